"""A member that tries to fix the settings of the mesh for good, or sets what leaves no ring."""

import asyncio
from pathlib import Path
from signal import SIGINT

from meshllm.names import NodeId, show
from meshllm.protocol.membership.charter import MAX_STEP, Amendments, Term
from meshllm.protocol.membership.records import Profile
from tests.processes.fleet import ALONE, Fleet, Node, meshllm, open_fleet, until
from tests.security.attack import Attack, Outcome
from tests.security.member import join
from tests.security.owner import alone_s, compared

FROZEN = Amendments(
    (
        Term("context", MAX_STEP, "16"),
        Term("policy", 2**64 - 1, "proportional"),
        Term("policy2", 1, "of no version"),
    )
)
LISTEN_S = 3.0  # s; a beat is sent each half second


def freeze_the_charter() -> Outcome:
    """Publish the highest versions; then restart the owner with flags, and remove the member."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        alone = alone_s(owner)
        state, removed = asyncio.run(_publish(ticket, fleet.folder / "attacker", owner))
        owner.send(SIGINT)
        owner.ended()
        owner.start("--policy", "throughput", "--context", "512", *ALONE)
        policy = _served_policy(fleet)
        crowded = alone_s(owner)
    effect = f"owner is {state}, restarts with policy {policy}, remove exits {removed}"
    held = (policy, state) == ("throughput", "serving")
    done = Outcome(effect, "a step of 2^32, founder first", held=held)
    return compared(done, alone, crowded)


def exclude_all() -> Outcome:
    """Exclude every node and ask for more than any can hold; then restart the owner."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        alone = alone_s(owner)
        asyncio.run(_exclude(ticket, fleet.folder / "attacker"))
        owner.send(SIGINT)
        owner.ended()
        owner.start("--model", "builtin", *ALONE)
        fleet.form()
        crowded = alone_s(owner)
        advice = owner.status()["ring"]["advice"]
    is_told = advice.startswith("No ring is possible with `--exclude` of")
    effect = f"the owner serves again, `ring status` {'names' if is_told else 'hides'} it"
    return compared(Outcome(effect, "the founder's terms", held=is_told), alone, crowded)


async def _exclude(ticket: str, state: Path) -> None:
    async with join(ticket, state) as member:
        profile = Profile("attacker", "1", (), 0)
        now = asyncio.get_running_loop().time()
        member.links.act(member.machine.publish(profile=profile, now=now))
        await asyncio.sleep(LISTEN_S)
        nodes: list[NodeId] = sorted(member.machine.profiles)
        exclude = Term("exclude", 9, b"".join(nodes).hex())
        member.say(Amendments((Term("ends", 9, "client"), exclude, Term("sessions", 9, "4096"))))
        await asyncio.sleep(LISTEN_S)


def _served_policy(fleet: Fleet) -> str:
    fleet.form()
    owner = fleet.node("owner")
    until(lambda: owner.status()["ring"]["policy"] != "", fleet.told)
    policy: str = owner.status()["ring"]["policy"]
    return policy


async def _publish(ticket: str, state: Path, owner: Node) -> tuple[str, int]:
    """Publish the settings; return the state of the owner's ring then, and of the removal."""
    async with join(ticket, state) as member:
        profile = Profile("attacker", "1", (), 0)
        now = asyncio.get_running_loop().time()
        member.links.act(member.machine.publish(profile=profile, now=now))
        await asyncio.sleep(LISTEN_S)
        member.say(FROZEN)
        await asyncio.sleep(LISTEN_S)
        found: str = (await asyncio.to_thread(owner.status))["ring"]["state"]
        words = "ring", "remove", "--yes", show(member.store.key.node)
        done = await asyncio.to_thread(meshllm, *words, state=owner.state)
        return found, done.returncode


ATTACKS = (
    Attack(
        "settings with version 2^32", "owner's restart exits with 7 each time", freeze_the_charter
    ),
    Attack("all nodes are excluded", "no ring until its removal", exclude_all),
)
