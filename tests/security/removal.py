"""A member that fills the list of removals, and one that returns with a new key."""

import asyncio
import secrets
import time
from pathlib import Path

from meshllm.errors import MeshError
from meshllm.names import NodeId
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.trust.credential import remove
from meshllm.protocol.trust.identity import show
from tests.processes.fleet import ALONE, Node, meshllm, open_fleet, until
from tests.security.attack import Attack, Outcome
from tests.security.member import Member, join

MADE_UP = 1024  # removals, as many as a mesh remembers
RETURN_S = 12.0  # s; a joiner gives up after five closed handshakes
GOSSIP_S = 6.0  # s


def fill_the_removals() -> Outcome:
    """Sign as many removals as a mesh remembers; then the owner removes the member."""
    with open_fleet() as fleet:
        ticket = fleet.found("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        code, known = asyncio.run(_fill(ticket, fleet.folder / "attacker", owner))
    effect = f"{known} removals remembered, owner's remove exits {code}"
    return Outcome(effect, "64 of 1,024 per branch, 512 kept", held=code == 0 and known <= 65)


def return_with_a_new_key() -> Outcome:
    """Join with the printed ticket, be removed, and join with it again under another key."""
    with open_fleet() as fleet:
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        until(lambda: bool(owner.stdout.strip()), fleet.told)
        ticket = owner.stdout.split()[0]
        is_back = asyncio.run(_return(ticket, fleet.folder, owner))
    effect = "it returned" if is_back else "refused"
    return Outcome(effect, "one use; closed by a removal", held=not is_back)


async def _fill(ticket: str, state: Path, owner: Node) -> tuple[int, int]:
    async with join(ticket, state) as member:
        await _show_up(member)
        mesh, now = member.credential.mesh, int(time.time())
        for _ in range(MADE_UP // 128):
            keys = [NodeId(secrets.token_bytes(32)) for _ in range(128)]
            member.say(*(remove(member.store.key, mesh, key, now) for key in keys))
            await asyncio.sleep(GOSSIP_S / 8)
        code = await asyncio.to_thread(_remove, member, owner)
    done = meshllm("ring", "members", "--json", state=owner.state)
    return code, done.stdout.count('"removed"')


async def _return(ticket: str, folder: Path, owner: Node) -> bool:
    async with join(ticket, folder / "first") as member:
        await _show_up(member)
        await asyncio.to_thread(_remove, member, owner)
    try:
        async with asyncio.timeout(RETURN_S), join(ticket, folder / "second"):
            return True
    except (MeshError, TimeoutError):
        return False


async def _show_up(member: Member) -> None:
    """Publish a profile, so that the owner can name the member."""
    now = asyncio.get_running_loop().time()
    profile = Profile("attacker", "1", (), 0)
    member.links.act(member.machine.publish(profile=profile, now=now))
    await asyncio.sleep(1)


def _remove(member: Member, owner: Node) -> int:
    words = "ring", "remove", "--yes", show(member.store.key.node)
    return meshllm(*words, state=owner.state).returncode


ATTACKS = (
    Attack("1,024 removals of made-up keys", "nobody can be removed any more", fill_the_removals),
    Attack(
        "a removed member, a new key", "back in the same second, same ticket", return_with_a_new_key
    ),
)
