"""Clients that send what is expensive to read."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread

from meshllm.api.unix import SOCKET
from meshllm.cli.shared.client import NodeClient
from meshllm.errors import MeshError
from meshllm.node.membership.state_store import StateStore
from meshllm.node.requests.request_json import request_to_json
from meshllm.protocol.membership.codec import REQUEST_ID_BYTES, Generate
from meshllm.protocol.trust.credential import Role
from meshllm.request import Request
from tests.processes.fleet import ALONE, Node, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.member import Member, join

OBJECTS = b"[" + b'{"":{}},' * ((4 << 20) // 8 - 1) + b"{}]"  # as long as a request may be
PAUSE_S = 0.05  # s between two requests
LONG_PAUSE_S = 0.5  # s between two of 4 MiB: 64 Mbit/s, each 0.69 s of work before
PROMPT = "What is a ring?"
RUNS = 3
FACTOR = 2.0  # most that the owner may wait, times what it waits alone


def objects_in_a_row() -> Outcome:
    """Let a client send 4 MiB of tiny objects without end, while the owner asks."""
    return _during(lambda: OBJECTS, LONG_PAUSE_S)


def objects_in_a_flood() -> Outcome:
    """Let a client send the same twenty times a second: 640 Mbit/s."""
    return _during(lambda: OBJECTS, PAUSE_S)


def endless_requests() -> Outcome:
    """Let a client ask for answers without end, 16 at a time, while the owner asks."""
    request = request_to_json(Request(raw="once upon a time", max_tokens=1_000_000))
    return _during(lambda: request, PAUSE_S)


def _during(request: Callable[[], bytes], pause_s: float) -> Outcome:
    with open_fleet() as fleet:
        fleet.found("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        at = (f"ws://{owner.address}",)
        ticket = StateStore.open(owner.state).invite(at, Role.CLIENT, lasts_s=3600, uses=None)
        _owner_s(owner)  # the first answers trace and measure
        alone = _owner_s(owner)
        with _flood(ticket.encode(), fleet.folder / "client", request, pause_s):
            crowded = _owner_s(owner)
    effect = f"owner's answer {alone:.2f} s -> {crowded:.2f} s"
    return Outcome(effect, f"{FACTOR:g} times", held=crowded <= FACTOR * alone)


def _owner_s(owner: Node) -> float:
    """Return the longest time of a few answers to the owner, on the socket of the node."""

    async def answer() -> None:
        request = Request(turns=({"role": "user", "content": PROMPT},))
        async for _ in NodeClient(owner.state / SOCKET).generate(request):
            pass

    times = []
    for _ in range(RUNS):
        begin = time.monotonic()
        asyncio.run(answer())
        times.append(time.monotonic() - begin)
    return max(times)


@contextmanager
def _flood(
    ticket: str, state: Path, request: Callable[[], bytes], pause_s: float
) -> Iterator[None]:
    """Send requests from another thread, and join again when the link is closed."""
    begun, stop = Event(), Event()

    async def run() -> None:
        for number in count():
            if stop.is_set():
                return
            with suppress(MeshError):
                async with join(ticket, state / str(number)) as member:
                    await asyncio.sleep(PAUSE_S)
                    begun.set()
                    await _send(member, request, pause_s, stop)
            await asyncio.sleep(PAUSE_S)

    state.mkdir()
    thread = Thread(target=asyncio.run, args=(run(),))
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _send(member: Member, request: Callable[[], bytes], pause_s: float, stop: Event) -> None:
    """Send requests until the link is closed."""
    while member.links.by_peer and not stop.is_set():
        for peer in list(member.links.by_peer):
            member.links.post(peer, Generate(os.urandom(REQUEST_ID_BYTES), request()))
        await asyncio.sleep(pause_s)


ATTACKS = (
    Attack("4 MiB of `{}` twice a second", "owner's answer 0.7 s -> 26 s", objects_in_a_row),
    Attack("4 MiB of `{}` 20 times a second", "owner's answer 3 times slower", objects_in_a_flood),
    Attack("endless requests", "owner's answer 0.4 s -> 36 s", endless_requests),
)
