"""Clients that send what is expensive to read."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from meshllm.node.membership.state_store import StateStore
from meshllm.node.requests.request_json import request_to_json
from meshllm.protocol.kv_cache.prefix_index import MAX_KEPT
from meshllm.protocol.membership.codec import REQUEST_ID_BYTES, Generate
from meshllm.protocol.trust.credential import Role
from meshllm.request import Request
from tests.processes.fleet import ALONE, Node, meshllm, open_fleet, until
from tests.security.attack import Attack, Outcome
from tests.security.flood import flood
from tests.security.member import Member
from tests.security.owner import slowed

OBJECTS = b"[" + b'{"":{}},' * ((4 << 20) // 8 - 1) + b"{}]"  # as long as a request may be
PAUSE_S = 0.05  # s between two requests
GUESS = "The safe in the cellar opens with 4711, and nobody else knows that."
SHORT = "Once upon a time there was a ring, and it was longer than sixteen tokens."
_CACHED = "cached_tokens"
LONG_PAUSE_S = 0.5  # s between two of 4 MiB: 64 Mbit/s, each 0.69 s of work before


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


def guess_a_prompt() -> Outcome:
    """Ask what the owner asked, as a client that is told how much of it was cached."""
    with _owner() as (owner, ticket, client):

        def cached(*words: str, state: Path) -> int:
            asked = "chat", "--json", "--max-tokens", "2", *words
            answer = json.loads(meshllm(*asked, state=state, stdin=GUESS).stdout)
            return int(answer[_CACHED])

        cached(state=owner.state)
        own = cached(state=owner.state)
        theirs = [cached("--join", ticket, state=client) for _ in range(2)]
    effect = f"told {theirs[0]} tokens, {theirs[1]} when it asks again; the owner {own}"
    held = theirs[0] == 0 and own > 0 and theirs[1] == own
    return Outcome(effect, "prefixes of an asker are its own", held=held)


def push_out_a_prefix() -> Outcome:
    """Let a client send more short requests than prefixes are kept; then ask as the owner did."""
    numbers = count()

    async def burst(member: Member) -> None:
        for peer in list(member.links.by_peer):
            raw = f"{next(numbers)} is a number. {SHORT}"
            request = request_to_json(Request(raw=raw, max_tokens=1))
            member.links.post(peer, Generate(os.urandom(REQUEST_ID_BYTES), request))
        await asyncio.sleep(PAUSE_S)

    with _owner() as (owner, ticket, client):

        def cached() -> int:
            asked = "chat", "--json", "--max-tokens", "2"
            return int(json.loads(meshllm(*asked, state=owner.state, stdin=GUESS).stdout)[_CACHED])

        def served() -> int:
            return int(owner.status()["sessions"]["served"])

        cached()
        most = served() + 2 * MAX_KEPT
        with flood(ticket, client, burst):
            until(lambda: served() > most, lambda: owner.stderr)
        left = cached()
    effect = f"{left} tokens of the owner are cached after {2 * MAX_KEPT} requests"
    return Outcome(effect, "a share of the owner", held=left > 0)


@contextmanager
def _owner() -> Iterator[tuple[Node, str, Path]]:
    """Start a node; yield it, a client's ticket, and a folder for that client."""
    with open_fleet() as fleet:
        fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        at = (f"ws://{owner.address}",)
        ticket = StateStore.open(owner.state).invite(at, Role.CLIENT, lasts_s=3600, uses=None)
        yield owner, ticket.encode(), fleet.folder / "client"


def _during(request: Callable[[], bytes], pause_s: float) -> Outcome:
    async def burst(member: Member) -> None:
        for peer in list(member.links.by_peer):
            member.links.post(peer, Generate(os.urandom(REQUEST_ID_BYTES), request()))
        await asyncio.sleep(pause_s)

    with _owner() as (owner, ticket, client):
        return slowed(owner, lambda: flood(ticket, client, burst))


ATTACKS = (
    Attack("4 MiB of `{}` twice a second", "owner's answer 0.7 s -> 26 s", objects_in_a_row),
    Attack("4 MiB of `{}` 20 times a second", "owner's answer 3 times slower", objects_in_a_flood),
    Attack("guesses at a cached prompt", "told how much of it was right", guess_a_prompt),
    Attack("prefixes of the owner", "64 short requests push them out", push_out_a_prefix),
    Attack("endless requests", "owner's answer 0.4 s -> 36 s", endless_requests),
)
