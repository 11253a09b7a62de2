"""Clients of the API on TCP: one with a key asks without end, one sends numbers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from meshllm.node.requests.request_json import REQUEST_BYTES
from tests.processes.fleet import ALONE, Node, free_address, meshllm, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.owner import slowed
from tests.security.stranger import running

CONNECTIONS = 300  # more than may wait
RUNNING = 8  # requests, one of them the owner's
PAUSE_S = 1.0  # s between two requests of a connection
SENDERS, SHORT_PAUSE_S = 4, 0.05
TOKENS = 1900  # of an answer; the model has 2,048
HEAD, TAIL = b'{"model": "builtin", "prompt": [1', b"]}"
NUMBERS = HEAD + b",1" * ((REQUEST_BYTES - len(HEAD) - len(TAIL)) // 2) + TAIL


def endless_requests_of_a_key() -> Outcome:
    """Ask for 300 endless answers at a time with an API key, while the owner asks."""
    fields = {"model": "builtin", "prompt": "once", "max_tokens": TOKENS, "ignore_eos": True}
    with _owner() as (owner, address):
        key = meshllm("key", "create", "guest", state=owner.state).stdout.strip()
        body = json.dumps(fields).encode()
        ask = partial(_keep_asking, address, body, PAUSE_S, f"Authorization: Bearer {key}\r\n")
        return slowed(owner, lambda: running(partial(_all, ask, CONNECTIONS)), factor=RUNNING)


def numbers() -> Outcome:
    """Send bodies of two million token ids on four connections without end."""
    with _owner() as (owner, address):
        send = partial(_keep_asking, address, NUMBERS, SHORT_PAUSE_S, "")
        return slowed(owner, lambda: running(partial(_all, send, SENDERS)))


@contextmanager
def _owner() -> Iterator[tuple[Node, str]]:
    """Start a node that serves the API; yield it and the address."""
    address = free_address()
    with open_fleet() as fleet:
        fleet.found("owner")
        owner = fleet.node("owner").start("--model", "builtin", "--serve", address, *ALONE)
        fleet.form()
        yield owner, address


async def _all(ask: Callable[[], Awaitable[None]], count: int) -> None:
    await asyncio.gather(*(ask() for _ in range(count)))


async def _keep_asking(address: str, body: bytes, pause_s: float, more: str) -> None:
    """Make one request after the other, whatever comes back."""
    host, port = address.split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\n{more}Connection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            await reader.read()
            writer.close()
        await asyncio.sleep(pause_s)


ATTACKS = (
    Attack("endless requests with a key", "the owner was refused", endless_requests_of_a_key),
    Attack("4 MiB of numbers to the API", "not known", numbers),
)
