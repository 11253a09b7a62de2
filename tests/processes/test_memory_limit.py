"""Nodes whose processes are limited to the memory that they offer."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.bench.growth import client_of
from tests.processes.fleet import ALONE, Fleet, Node, open_fleet

OFFER = 840 << 20
"""Bytes: the process itself, and KV cache for tens of thousands of tokens."""
SESSIONS, CONVERSATIONS, TURNS = 16, 8, 6
LONG = "Tell me a story about a ring of machines. " * 100

pytestmark = [
    pytest.mark.socket,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not shutil.which("prlimit"), reason="no prlimit"),
]


@pytest.fixture
def pair() -> Iterator[Fleet]:
    """Two nodes in one ring; the kernel limits the data of each to the memory it offers."""
    limit, offer = ("prlimit", f"--data={OFFER}"), ("--memory", f"{OFFER >> 20}MiB")
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("one")
        fleet.node("one").start("--members", "2", *offer, *ALONE, within=limit)
        fleet.node("two").start("--join", ticket, *offer, *ALONE, within=limit)
        fleet.form()
        yield fleet


def ask(client: httpx2.Client, number: int) -> httpx2.Response:
    """Send a long prompt that no other session has."""
    return client.post("/mesh/ask", json={"raw": f"{number} {LONG}", "max_tokens": 60})


def converse(client: httpx2.Client, number: int) -> None:
    """Chat for some turns, each with the whole history."""
    messages = list[dict[str, str]]()
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{number}: what is {turn} + {number}?"})
        asked = {"model": "builtin", "messages": messages, "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["choices"][0]["message"])


def resident(node: Node) -> int:
    """Return the bytes of a process."""
    size: int = node.status()["memory"]["process"]
    return size


def test_no_process_runs_out_of_the_memory_it_offered(pair: Fleet) -> None:
    one, two = pair.nodes.values()

    with client_of(one) as client, ThreadPoolExecutor(SESSIONS) as pool:
        replies = list(pool.map(lambda number: ask(client, number), range(SESSIONS)))
        too_long = client.post("/mesh/ask", json={"raw": LONG * 40, "max_tokens": 5})
        for number in range(CONVERSATIONS):
            converse(client, number)

    assert [reply.status_code for reply in replies] == [200] * SESSIONS
    assert too_long.status_code == 400
    told = too_long.json()["error"]["message"]
    assert re.search(r" has \d+ characters, more than that many tokens can have", told)
    assert one.is_running
    assert two.is_running
    assert max(resident(one), resident(two)) <= OFFER
