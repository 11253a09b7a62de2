"""A member that signs what is of nobody, or of the far future, and takes the name of another."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from meshllm.names import NodeId
from meshllm.protocol.membership.actions import SendToPeer
from meshllm.protocol.membership.codec import Items, MeshHeartbeat
from meshllm.protocol.membership.gossip import MARK_BYTES, Item, Kind
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from meshllm.protocol.trust.credential import remove
from tests.processes.fleet import ALONE, Fleet, ask, open_fleet, until
from tests.security.attack import Attack, Outcome
from tests.security.member import Member, join
from tests.security.owner import alone_s, compared, owner_s
from tests.security.removal import remove_by

LAST = 2**64 - 1  # incarnation, sequence, seconds since 1970
YEAR_9999_MS = 253_402_300_799_999
LISTEN_S = 2.0  # s; a beat is sent each half second
PROMPT = "What is a ring?"
Attempt = Callable[[Member, NodeId], Awaitable[str]]


def forged_records() -> Outcome:
    """Send a state, a profile and a removal in the name of the owner."""

    async def attempt(member: Member, owner: NodeId) -> str:
        credential = member.credential.encode()
        gone = Item(Kind.STATE, owner, owner, LAST, LAST, b"", StateRecord(Lifecycle.LEFT).encode())
        profile = Profile("owner", "1", ("ws://192.0.2.1:1",), 0)
        moved = Item(Kind.PROFILE, owner, owner, LAST, LAST, credential, profile.encode())
        by_me = remove(member.store.key, member.credential.mesh, owner, int(time.time()))
        for item in (gone, moved, replace(gone, author=member.store.key.node)):
            signed = item.sign(member.store.key, member.credential.mesh)
            _send(member, Items((signed,)))
        member.say(by_me)
        await asyncio.sleep(LISTEN_S)
        return "link closed" if not member.links.by_peer else "ignored"

    return _with_member(attempt, "signatures of their author")


def future_records() -> Outcome:
    """Send the highest counts and times that fit, then be removed."""

    async def attempt(member: Member, _: NodeId) -> str:
        key, mesh = member.store.key, member.credential.mesh
        shown = member.credential.encode()
        profile, state = Profile("attacker", "1", (), 0), StateRecord(Lifecycle.SERVING)
        for item in (
            Item(Kind.PROFILE, key.node, key.node, LAST, LAST, shown, profile.encode()),
            Item(Kind.STATE, key.node, key.node, LAST, LAST, b"", state.encode()),
        ):
            _send(member, Items((item.sign(key, mesh),)))
        _send(member, MeshHeartbeat(LAST, LAST, 0, YEAR_9999_MS, bytes(MARK_BYTES)))
        member.say(remove(key, mesh, NodeId(bytes(31) + b"\7"), LAST))
        await asyncio.sleep(LISTEN_S)
        return "accepted as its own"

    return _with_member(attempt, "of its author only")


def two_of_one_name() -> Outcome:
    """Take the name of a node that the owner prefers and the founder pinned."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        words = "--members", "1", "--prefer", "bob"
        owner = fleet.node("owner").start("--model", "builtin", *words, *ALONE)
        fleet.node("bob").start("--join", ticket, "--model", "builtin", *ALONE)
        until(lambda: len(owner.states()) == 2, fleet.told)
        alone = alone_s(owner)
        crowded = asyncio.run(_be_bob(ticket, fleet))
        answer = ask(owner, PROMPT)
    effect = f"the owner is answered ({len(answer)} B)"
    return compared(Outcome(effect, "a ring", held=bool(answer.strip())), alone, crowded)


async def _be_bob(ticket: str, fleet: Fleet) -> float:
    """Return how long the owner waits for an answer meanwhile."""
    async with join(ticket, fleet.folder / "attacker") as member:
        profile, state = Profile("bob", "1", (), 0), StateRecord(Lifecycle.SERVING)
        now = asyncio.get_running_loop().time()
        member.links.act(member.machine.publish(profile=profile, state=state, now=now))
        owner = fleet.node("owner")
        here = 3  # owner, bob, bob
        await asyncio.to_thread(until, lambda: len(owner.status()["nodes"]) == here, fleet.told)
        await asyncio.to_thread(until, lambda: owner.status()["ring"]["state"] == "serving")
        return await asyncio.to_thread(owner_s, owner)


def _with_member(attempt: Attempt, bound: str) -> Outcome:
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", "--members", "1", *ALONE)
        fleet.form()

        async def run(state: Path) -> tuple[str, int, float]:
            async with join(ticket, state) as member:
                (me,) = member.links.by_peer
                now = asyncio.get_running_loop().time()
                profile = Profile("attacker", "1", (), 0)
                member.links.act(member.machine.publish(profile=profile, now=now))
                await asyncio.sleep(LISTEN_S)
                said = await attempt(member, me)
                crowded = await asyncio.to_thread(owner_s, owner)
                return said, await asyncio.to_thread(remove_by, member, owner), crowded

        alone = alone_s(owner)
        said, code, crowded = asyncio.run(run(fleet.folder / "attacker"))
        ring, answer = owner.status()["ring"]["state"], ask(owner, PROMPT)
    held = ring == "serving" and code == 0 and bool(answer.strip())
    outcome = Outcome(f"{said}; ring {ring}, remove exits {code}", bound, held=held)
    return compared(outcome, alone, crowded)


def _send(member: Member, message: Items | MeshHeartbeat) -> None:
    for peer in list(member.links.by_peer):
        member.links.act([SendToPeer(peer, message)])


ATTACKS = (
    Attack("forged records", "not known", forged_records),
    Attack("records of the far future", "not known", future_records),
    Attack("two nodes of one name", "no node ever agreed again", two_of_one_name),
)
