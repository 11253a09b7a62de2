"""Members and clients that send without end what is small, or dear to read."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from websockets.frames import Frame, Opcode

from meshllm.errors import MeshError
from meshllm.names import NodeId
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.membership.codec import (
    MAX_SLOTS,
    REQUEST_ID_BYTES,
    AnswerEvent,
    CancelRequest,
    MeshHeartbeat,
    Message,
    Summary,
    UnknownMeshMessage,
    Want,
    encode,
)
from meshllm.protocol.membership.gossip import MARK_BYTES, Kind, Slot, SummaryEntry
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from meshllm.protocol.trust.credential import Role
from meshllm.transport.contract import Channel
from meshllm.transport.lanes import BACK, head
from meshllm_websocket.connection import WebsocketConnection
from meshllm_websocket.frames import frame
from tests.processes.fleet import ALONE, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.flood import Burst, flood
from tests.security.member import Member
from tests.security.owner import slowed

IN_A_ROW = 300  # messages before it looks whether the link is there
STATES = 200  # records in a row
FRAMES = 5000  # of a few bytes, in one write
FULL_BYTES = 1 << 18  # unsent: the victim does not read faster

_SLOTS = tuple(Slot(Kind.REMOVAL, NodeId(number.to_bytes(32))) for number in range(MAX_SLOTS))
_ENTRIES = tuple(SummaryEntry(slot, 0, 0, bytes(MARK_BYTES)) for slot in _SLOTS)


def _messages(*messages: Message, channel: Channel = Channel.CONTROL) -> Burst:
    encoded = [encode(message) for message in messages]

    async def burst(member: Member) -> None:
        for link in member.links.by_peer.values():
            with suppress(MeshError):
                for _ in range(IN_A_ROW // len(encoded)):
                    for each in encoded:
                        await link.send([each], channel)
        await asyncio.sleep(0)

    return burst


def _frames(*small: bytes) -> Burst:
    async def burst(member: Member) -> None:
        for link in member.links.by_peer.values():
            wire = link._link._wire  # type: ignore[attr-defined]  # below what a link sends
            assert isinstance(wire, WebsocketConnection)
            if wire.socket.get_write_buffer_size() < FULL_BYTES:
                wire.socket.write(b"".join(small) * FRAMES)
        await asyncio.sleep(0.001)

    return burst


async def _records(member: Member) -> None:
    """Sign a new state again and again."""
    now = asyncio.get_running_loop().time()
    links, machine = member.links, member.machine
    links.act(machine.publish(profile=Profile("attacker", "1", (), 0), now=now))
    for _ in range(STATES):
        links.act(machine.publish(state=StateRecord(Lifecycle.SERVING), now=now))
        await asyncio.sleep(0)


def _by(role: Role, burst: Burst) -> Callable[[], Outcome]:
    def attack() -> Outcome:
        with open_fleet() as fleet:
            fleet.create_mesh("owner")
            owner = fleet.node("owner").start("--model", "builtin", "--members", "1", *ALONE)
            fleet.form()
            at = (f"ws://{owner.address}",)
            ticket = StateStore.open(owner.state).invite(at, role, lasts_s=3600, uses=None)
            return slowed(owner, lambda: flood(ticket.encode(), fleet.folder / "attacker", burst))

    return attack


_TINY = _messages(UnknownMeshMessage(99, b""), MeshHeartbeat(1, 1, 0, 0, bytes(MARK_BYTES)))
_GOSSIP = _messages(Summary(_ENTRIES), Want(_SLOTS))
_CANCELS = _messages(CancelRequest(bytes(REQUEST_ID_BYTES)), channel=Channel.DATA)
_ANSWERS = _messages(AnswerEvent(bytes(REQUEST_ID_BYTES), b"{}"), channel=Channel.DATA)
_CREDIT = _frames(*frame(head(BACK, 0), b"", is_masked=True))
_PINGS = _frames(Frame(Opcode.PING, b"").serialize(mask=True))

ATTACKS = (
    Attack("tiny messages of a member", "owner's answer 0.1 s -> 9.8 s", _by(Role.NODE, _TINY)),
    Attack(
        "tiny messages of a client", "owner's answer 0.1 s -> 9.3 s", _by(Role.CLIENT, _CANCELS)
    ),
    Attack("summaries of 1,537 items", "owner's answer 12 times slower", _by(Role.NODE, _GOSSIP)),
    Attack("200 records at once", "not known", _by(Role.NODE, _records)),
    Attack("answers nobody asked for", "not known", _by(Role.NODE, _ANSWERS)),
    Attack("credit for nothing", "owner's answer 20 times slower", _by(Role.NODE, _CREDIT)),
    Attack("WebSocket pings", "owner's answer over 5 s", _by(Role.NODE, _PINGS)),
)
