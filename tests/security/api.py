"""Clients of the API on TCP with a key: one asks without end, one sends numbers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import httpx2

from meshllm.api.respond import SHORT_BYTES
from meshllm.node.requests.request_json import REQUEST_BYTES
from tests.processes.fleet import ALONE, WAIT_S, Node, free_address, meshllm, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.owner import PROMPT, alone_s, compared, median_s, owner_s
from tests.security.stranger import running

CONNECTIONS = 300  # more than may wait
BESIDE = 7  # requests run beside one of the owner
PAUSE_S = 1.0  # s between two requests of a connection
SENDERS, SHORT_PAUSE_S = 4, 0.05
TOKENS = 1900  # of an answer; the model has 2,048
HEAD, TAIL = b'{"model": "builtin", "prompt": [1', b"]}"
NUMBERS = HEAD + b",1" * ((REQUEST_BYTES - len(HEAD) - len(TAIL)) // 2) + TAIL


def endless_requests_of_a_key() -> Outcome:
    """Ask for 300 endless answers at a time with an API key, while the owner asks.

    The owner's answer takes longer beside those that run, but no longer with more that wait.
    """
    fields = {"model": "builtin", "prompt": "once", "max_tokens": TOKENS, "ignore_eos": True}
    with _owner() as (owner, address):
        body = json.dumps(fields).encode()
        ask = partial(_keep_asking, address, body, PAUSE_S, _key(owner, "guest"))
        with running(partial(_all, ask, BESIDE)):
            few = alone_s(owner)
        with running(partial(_all, ask, CONNECTIONS)):
            return compared(None, few, owner_s(owner))


def numbers() -> Outcome:
    """Send bodies of two million token ids with a key on four connections without end.

    As many send such bodies and leave at once.
    The owner asks at the same API server, with bodies that are read where those are.
    """
    with _owner() as (owner, address):
        key = _key(owner, "guest")
        send = partial(_keep_asking, address, NUMBERS, SHORT_PAUSE_S, key)
        leave = partial(_keep_asking, address, NUMBERS, PAUSE_S, key, leaves=True)
        ask = partial(_ask_long, address, _key(owner, "own", "--owner"))
        median_s(ask)  # the first answers trace and measure
        alone = median_s(ask)
        with running(partial(_all, send, SENDERS)), running(partial(_all, leave, SENDERS)):
            crowded = median_s(ask)
        return compared(None, alone, crowded)


@contextmanager
def _owner() -> Iterator[tuple[Node, str]]:
    """Start a node that serves the API; yield it and the address."""
    address = free_address()
    with open_fleet() as fleet:
        fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", "--serve", address, *ALONE)
        fleet.form()
        yield owner, address


def _key(owner: Node, *name: str) -> str:
    """Create an API key; return what a request carries."""
    return f"Bearer {meshllm('key', 'create', *name, state=owner.state).stdout.strip()}"


def _ask_long(address: str, key: str) -> None:
    """Make a request that is too long to be read on the event loop."""
    message = {"role": "user", "content": PROMPT}
    fields = {"model": "builtin", "messages": [message], "user": "x" * SHORT_BYTES}
    url, headers = f"http://{address}/v1/chat/completions", {"authorization": key}
    httpx2.post(url, json=fields, headers=headers, timeout=WAIT_S).raise_for_status()


async def _all(ask: Callable[[], Awaitable[None]], count: int) -> None:
    await asyncio.gather(*(ask() for _ in range(count)))


async def _keep_asking(
    address: str, body: bytes, pause_s: float, key: str, *, leaves: bool = False
) -> None:
    """Make one request after the other, whatever comes back; it may leave before that."""
    host, port = address.split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: {key}\r\n"
        "Connection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            await writer.drain()
            if not leaves:
                await reader.read()
            writer.close()
        await asyncio.sleep(pause_s)


ATTACKS = (
    Attack("endless requests with a key", "the owner was refused", endless_requests_of_a_key),
    Attack("4 MiB of numbers to the API", "owner's answer 0.19 s -> 6.79 s", numbers),
)
