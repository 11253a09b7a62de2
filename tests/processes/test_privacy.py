"""What a node reveals to another account of the machine and to unknown peers."""

import base64
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from meshllm import __version__
from meshllm.errors import LinkLost
from meshllm.names import parse_node, short, show
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.beacon import JoinerBeacons
from meshllm.node.net.secure import HandshakeClosed, secure_dial
from meshllm.protocol.trust.credential import Role, founder_credential
from meshllm.protocol.trust.handshake import LocalIdentity, Purpose
from meshllm.protocol.trust.identity import NodeKey
from meshllm_websocket import WebsocketTransport
from tests.processes.fleet import ALONE, Node, open_fleet, until
from tests.processes.fork_server import ForkServer

pytestmark = [pytest.mark.socket, pytest.mark.timeout(120)]

NOBODY = 65534
LOOK = """
import os, socket, sys
state, user = sys.argv[1], int(sys.argv[2])
connect = socket.socket(socket.AF_UNIX).connect
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
for name, attempt in (
    ("node.key", open), ("mesh.json", open), ("lock", open), ("api.sock", connect),
    ("", os.listdir), ("node.key", os.stat),
):
    try:
        attempt(os.path.join(state, name))
    except PermissionError:
        print(name, "refused")
    else:
        print(name, "open")
"""


@pytest.fixture(scope="module")
def node(server: ForkServer) -> Iterator[Node]:
    """One node, in a folder that others may enter."""
    with open_fleet(server) as fleet:
        fleet.create_mesh("attic")
        node = fleet.node("attic").start(*ALONE)
        until(node.is_up, fleet.told)
        fleet.folder.chmod(0o755)
        node.folder.chmod(0o755)
        yield node


def test_secrets_are_readable_by_their_owner_only(node: Node) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in node.state.iterdir()}

    assert node.state.stat().st_mode & 0o777 == 0o700
    assert {name: modes[name] for name in ("node.key", "mesh.json", "api.sock")} == {
        "node.key": 0o600,
        "mesh.json": 0o600,
        "api.sock": 0o600,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_account_reads_neither_key_nor_socket(node: Node) -> None:
    theirs, ours = (
        subprocess.check_output([sys.executable, "-c", LOOK, node.state, str(user)], text=True)
        for user in (NOBODY, 0)
    )

    assert theirs.split("\n")[:-1] == [
        f"{name} refused" for name in ("node.key", "mesh.json", "lock", "api.sock", "", "node.key")
    ]
    assert ours == theirs.replace("refused", "open")


UPGRADE = (
    "GET / HTTP/1.1\r\nHost: mesh\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
TEXT, BINARY, PING = 0x81, 0x82, 0x89


def frame(kind: int, data: bytes) -> bytes:
    """Make a WebSocket frame as a client does, under a mask of zeros."""
    return bytes([kind, 0x80 | len(data), 0, 0, 0, 0]) + data


ATTEMPTS: dict[str, tuple[bytes, ...]] = {
    "get": (b"GET / HTTP/1.1\r\nHost: mesh\r\n\r\n",),
    "old": (b"GET /mesh/status HTTP/1.0\r\n\r\n",),
    "metrics": (b"GET /metrics HTTP/1.1\r\nHost: mesh\r\n\r\n",),
    "post": (b"POST /mesh/ticket HTTP/1.1\r\nHost: mesh\r\nContent-Length: 2\r\n\r\n{}",),
    "browser": (f"{UPGRADE}Origin: http://page\r\n\r\n".encode(),),
    "lines": (b"\r\n\r\n",),
    "garbage": (bytes(range(256)) * 400,),
    "words": (f"{UPGRADE}\r\n".encode(), frame(TEXT, b"hello")),
    "frames": (f"{UPGRADE}\r\n".encode(), frame(BINARY, bytes(120))),
    "ping": (f"{UPGRADE}\r\n".encode(), frame(PING, b"who"), frame(BINARY, b"\x01" * 120)),
    "protocol": (
        f"{UPGRADE}Sec-WebSocket-Protocol: meshllm\r\n\r\n".encode(),
        frame(BINARY, b"\x00" * 125),
    ),
}


def said_to(node: Node, parts: tuple[bytes, ...]) -> bytes:
    """Send these parts to a node; return its replies until it closes the connection."""
    host, _, port = node.address.partition(":")
    heard = bytearray()
    with socket.create_connection((host, int(port))) as line:
        try:
            for part in parts:
                line.sendall(part)
                heard += line.recv(1 << 16)
            while more := line.recv(1 << 16):
                heard += more
        except ConnectionError:
            pass  # it closed the connection before all was sent
    return bytes(heard)


def test_an_unknown_peer_learns_only_that_a_port_is_open(node: Node) -> None:
    status = node.status()
    me, mesh = parse_node(status["node"]), bytes.fromhex(status["mesh"])
    telling = [
        me, me.hex().encode(), show(me).encode(), short(me).encode(), mesh, mesh.hex().encode(),
        b"attic", b"meshllm", b"llm", b"websockets", b"Python", b"builtin", __version__.encode(),
    ]  # fmt: skip

    heard = {name: said_to(node, parts) for name, parts in ATTEMPTS.items()}

    for name, said in heard.items():
        assert [word for word in telling if word.lower() in said.lower()] == [], name
        assert len(said) < 300, name
    assert b"101" in heard["frames"]  # it reached the handshake


async def test_an_expired_ticket_gets_no_reply(node: Node) -> None:
    store = StateStore.open(node.state)
    open_one = store.invite([node.address], Role.NODE, lasts_s=None, uses=None)
    leaked = store.invite([node.address], Role.NODE, lasts_s=-1, uses=None)
    mesh = bytes.fromhex(node.status()["mesh"])

    for ticket in (open_one, leaked):
        link = await WebsocketTransport().dial(f"ws://{node.address}")
        own = LocalIdentity(NodeKey(secrets.token_bytes(32)), 1, ticket)
        dialling = secure_dial(
            link, own, Purpose.MESH, expect=ticket.inviter, now_s=time.time(), removals={}
        )
        if ticket is open_one:
            await (await dialling).close()
        else:
            with pytest.raises(HandshakeClosed):
                await dialling
            assert link.statistics.bytes_received == 0
        digits = ticket.encode()[8:].upper()
        assert mesh not in base64.b32decode(digits + "=" * (-len(digits) % 8))
        (beacon,) = JoinerBeacons(mesh, ticket.inviter).seal([node.address], None)
        assert JoinerBeacons(ticket.psk, ticket.inviter).read(beacon) is None


async def test_a_member_of_another_mesh_gets_no_handshake_reply(node: Node) -> None:
    key = NodeKey(secrets.token_bytes(32))
    other = founder_credential(key, secrets.token_bytes(16))
    link = await WebsocketTransport().dial(f"ws://{node.address}")

    with pytest.raises(LinkLost, match="closed the connection during the handshake"):
        await secure_dial(
            link,
            LocalIdentity(key, 1, other),
            Purpose.MESH,
            expect=parse_node(node.status()["node"]),
            now_s=time.time(),
            removals={},
        )

    assert link.statistics.bytes_received == 0
