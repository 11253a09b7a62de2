"""A member that fills the list of removals, and ones that return after theirs."""

import asyncio
import secrets
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from meshllm.errors import MeshError
from meshllm.names import NodeId, parse_node, show
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.secure import secure_dial
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.trust.credential import Credential, Role, issue, remove
from meshllm.protocol.trust.handshake import LocalIdentity, Purpose
from meshllm_websocket.transport import WebsocketTransport
from tests.processes.fleet import ALONE, Node, meshllm, open_fleet, until
from tests.security.attack import Attack, Outcome
from tests.security.member import Member, join
from tests.security.owner import alone_s, compared, owner_s

MADE_UP = 1024  # removals, as many as a mesh remembers
RETURN_S = 12.0  # s; a joiner gives up after five closed handshakes
GOSSIP_S = 6.0  # s


def fill_the_removals() -> Outcome:
    """Sign as many removals as a mesh remembers; then the owner removes the member."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        alone = alone_s(owner)
        code, known, crowded = asyncio.run(_fill(ticket, fleet.folder / "attacker", owner))
    effect = f"{known} removals remembered, owner's remove exits {code}"
    held = code == 0 and known <= 65
    return compared(Outcome(effect, "64 of 1,024 per branch, 512 kept", held), alone, crowded)


def return_with_a_new_key() -> Outcome:
    """Join with the printed ticket, be removed, and join with it again under another key."""
    with open_fleet() as fleet:
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        until(lambda: bool(owner.stdout.strip()), fleet.told)
        ticket = owner.stdout.split()[0]
        is_back = asyncio.run(_return(ticket, fleet.folder, owner))
    effect = "it returned" if is_back else "refused"
    return Outcome(effect, "one use; closed by a removal", held=not is_back)


def greet_after_a_removal() -> Outcome:
    """Join, be removed, and dial again with the key and all that a member knows."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        state = fleet.folder / "attacker"
        was_answered, heard = asyncio.run(heard_by_a_former_member(owner, ticket, state))
    effect = f"{heard} bytes in reply"
    return Outcome(effect, "no byte, no node id", held=was_answered and heard == 0)


def spare_what_the_founder_removed() -> Outcome:
    """Sign another removal of a removed member, which spares its guest."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        first, heard = asyncio.run(_spare(ticket, fleet.folder, owner))
    return Outcome(f"{heard} bytes in reply", "no byte", held=first > 0 and heard == 0)


async def _spare(ticket: str, folder: Path, owner: Node) -> tuple[int, int]:
    """Return how many bytes the guest heard before, and at last.

    The accomplice has a higher id than the founder, which decided before.
    """
    founder = parse_node(owner.status()["node"])
    states = (folder / f"accomplice-{number}" for number in count())
    above = next(each for each in states if StateStore.open(each).key.node > founder)
    async with join(ticket, folder / "member") as member, join(ticket, above) as accomplice:
        puppet = StateStore.open(folder / "puppet")
        shown = issue(member.store.key, member.credential, puppet.key.node, Role.NODE)
        first = await bytes_heard(owner, puppet, shown)
        await _show_up(member)
        await asyncio.to_thread(remove_by, member, owner)
        gone, now = member.store.key.node, int(time.time())
        key, mesh = accomplice.store.key, accomplice.credential.mesh
        accomplice.say(remove(key, mesh, gone, now, (puppet.key.node,)))
        await asyncio.sleep(GOSSIP_S / 2)
        return first, await bytes_heard(owner, puppet, shown)


async def heard_by_a_former_member(founder: Node, invitation: str, state: Path) -> tuple[bool, int]:
    """Join, dial, be removed, dial; return whether the first was answered, and bytes of the last.

    What it knows is all that it needs to greet as a member: the mesh id, the key of the founder,
    credentials.
    """
    async with join(invitation, state) as member:
        store, credential = member.store, member.credential
        first = await bytes_heard(founder, store, credential)
        removal = "ring", "remove", "--yes", show(store.key.node)
        now = asyncio.get_running_loop().time()
        member.links.act(member.machine.publish(profile=Profile("member", "1", (), 0), now=now))
        await asyncio.to_thread(until, lambda: "member" in founder.states())
        done = await asyncio.to_thread(lambda: meshllm(*removal, state=founder.state))
        assert done.returncode == 0, done.stderr
    return first > 0, await bytes_heard(founder, store, credential)


async def bytes_heard(founder: Node, store: StateStore, credential: Credential) -> int:
    """Dial with a credential; return how many bytes came back."""
    link = await WebsocketTransport().dial(f"ws://{founder.address}")
    own, to = LocalIdentity(store.key, 1 << 20, credential), parse_node(founder.status()["node"])
    with suppress(MeshError):
        dialled = await secure_dial(
            link, own, Purpose.WEIGHTS, expect=to, now_s=time.time(), removals={}
        )
        await dialled.close()
    await link.close()
    return link.statistics.bytes_received


async def _fill(ticket: str, state: Path, owner: Node) -> tuple[int, int, float]:
    async with join(ticket, state) as member:
        await _show_up(member)
        mesh, now = member.credential.mesh, int(time.time())
        for _ in range(MADE_UP // 128):
            keys = [NodeId(secrets.token_bytes(32)) for _ in range(128)]
            member.say(*(remove(member.store.key, mesh, key, now) for key in keys))
            await asyncio.sleep(GOSSIP_S / 8)
        crowded = await asyncio.to_thread(owner_s, owner)
        code = await asyncio.to_thread(remove_by, member, owner)
    done = meshllm("ring", "members", "--json", state=owner.state)
    return code, done.stdout.count('"removed"'), crowded


async def _return(ticket: str, folder: Path, owner: Node) -> bool:
    async with join(ticket, folder / "first") as member:
        await _show_up(member)
        await asyncio.to_thread(remove_by, member, owner)
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


def remove_by(member: Member, owner: Node) -> int:
    """Remove a member with the command of the owner; return its exit code."""
    words = "ring", "remove", "--yes", show(member.store.key.node)
    return meshllm(*words, state=owner.state).returncode


ATTACKS = (
    Attack("1,024 removals of made-up keys", "nobody can be removed any more", fill_the_removals),
    Attack("a removed member greets", "handshake message 2, node ids", greet_after_a_removal),
    Attack(
        "a removal that spares a guest",
        "the guest is a member again",
        spare_what_the_founder_removed,
    ),
    Attack(
        "a removed member, a new key", "back in the same second, same ticket", return_with_a_new_key
    ),
)
