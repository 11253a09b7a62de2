"""Finding nodes of the mesh on the local network.

A beacon is one multicast datagram: a magic word, a nonce, and the sender's node id and addresses
under a key that follows from a pre-shared one (AES-256-GCM). Who holds that reads it; to anyone
else it is noise that does not even tell two meshes apart. It is a hint where to dial and no more:
who answers there is found out by the handshake. Members share the mesh id. A beacon is sent when a
node starts, then ever more rarely, and in return to one that was not heard before.

One without addresses is a question: it is answered, under its own key. So asks who comes with a
ticket, under the key of that, and its inviter reads it while the ticket is open.
"""

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import psutil  # type: ignore[import-untyped]  # ships no types
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from meshllm.names import NODE_ID_BYTES, NodeId

GROUP_V4 = "239.255.77.77"  # organisation-local, RFC 2365
GROUP_V6 = "ff12::6d65:7368"  # link-local, transient, RFC 4291 section 2.7
PORT = 7701
MAGIC = b"meshllm beacon 1"
NONCE_BYTES = 12
MAX_BEACON_BYTES = 1200  # fits every link without fragments
MAX_ADDRESSES = 16
MAX_KNOWN = 1024  # nodes that got a beacon in return; a member may make some up
ANSWER_S = 0.2  # s between two answers, and between two looks at what no member wrote
FIRST_S, LAST_S = 0.5, 30.0  # s between beacons, doubling; a new node is heard at its start anyway

_CONTEXT = "meshllm 2026-11 beacon"

Heard = Callable[[NodeId, tuple[str, ...]], None]
Guests = Callable[[], Iterable[bytes]]
"""Yields the pre-shared keys of those who may ask; called while the noise of strangers is read."""

logger = logging.getLogger(__name__)


class Code:
    """Writes and reads the beacons under one pre-shared key."""

    def __init__(self, psk: bytes) -> None:
        self._cipher = AESGCM(blake3(psk, derive_key_context=_CONTEXT).digest())

    def write(self, node: NodeId, addresses: Sequence[str]) -> bytes:
        """Make a beacon, with as many addresses as fit."""
        nonce, kept = os.urandom(NONCE_BYTES), list(addresses[:MAX_ADDRESSES])
        while len(text := json.dumps(kept).encode()) > MAX_BEACON_BYTES // 2:
            kept.pop()
        return MAGIC + nonce + self._cipher.encrypt(nonce, node + text, MAGIC)

    def read(self, beacon: bytes) -> tuple[NodeId, tuple[str, ...]] | None:
        """Return who sent a beacon and from where; None for what is none under this key."""
        if len(beacon) > MAX_BEACON_BYTES or not beacon.startswith(MAGIC):
            return None
        rest = beacon[len(MAGIC) :]
        try:
            plain = self._cipher.decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], MAGIC)
            addresses = json.loads(plain[NODE_ID_BYTES:])
        except (InvalidTag, ValueError, RecursionError):
            return None
        if not isinstance(addresses, list) or not all(isinstance(at, str) for at in addresses):
            return None
        return NodeId(plain[:NODE_ID_BYTES]), tuple(addresses[:MAX_ADDRESSES])


class Beacon(asyncio.DatagramProtocol):
    """Tells the local network where a node is, and hears where others are."""

    def __init__(self, code: Code, me: NodeId, heard: Heard, guests: Guests = tuple) -> None:
        self.addresses: tuple[str, ...] = ()
        """Where this node can be dialled; while there are none, it can only ask."""
        self._code = code
        self._me = me
        self._heard = heard
        self._guests = guests
        self._answered = self._looked = -ANSWER_S
        self._known: set[NodeId] = set()
        self._transports: dict[asyncio.DatagramTransport, tuple[str, int]] = {}

    def add(self, transport: asyncio.DatagramTransport, group: str) -> None:
        """Use one more interface."""
        self._transports[transport] = group, PORT

    def datagram_received(self, data: bytes, _: object) -> None:
        """Hear a beacon."""
        match self._code.read(data):
            case (node, ()) if node != self._me:
                self._answer(self._code)
            case (node, addresses) if node != self._me:
                if node not in self._known and len(self._known) < MAX_KNOWN and self.addresses:
                    self._known.add(node)
                    self.send()
                self._heard(node, addresses)
            case None:
                self._hear_guest(data)

    def _hear_guest(self, data: bytes) -> None:
        """Answer who has a ticket; a flood of noise gets one look at a time."""
        now = asyncio.get_running_loop().time()
        if self.addresses and data.startswith(MAGIC) and now >= self._looked + ANSWER_S:
            self._looked = now
            codes = (Code(psk) for psk in self._guests())
            if asked := next((code for code in codes if code.read(data)), None):
                self._answer(asked)

    def _answer(self, code: Code) -> None:
        now = asyncio.get_running_loop().time()
        if self.addresses and now >= self._answered + ANSWER_S:
            self._answered = now
            self.send(code)

    def error_received(self, exc: Exception) -> None:
        """Note that an interface takes no multicast."""
        logger.debug("a beacon was not sent: %s", exc)

    def send(self, code: Code | None = None) -> None:
        """Send one beacon on every interface."""
        beacon = (code or self._code).write(self._me, self.addresses)
        for transport, group in self._transports.items():
            transport.sendto(beacon, group)

    async def run(self, longest_s: float = LAST_S) -> None:
        """Send beacons until cancelled."""
        pause = FIRST_S
        while True:
            self.send()
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest_s)


@asynccontextmanager
async def open_beacon(
    psk: bytes, me: NodeId, heard: Heard, guests: Guests = tuple
) -> AsyncIterator[Beacon]:
    """Listen on every interface that takes multicast; hear others until the end of the context."""
    loop = asyncio.get_running_loop()
    beacon = Beacon(Code(psk), me, heard, guests)
    opened = []
    try:
        for group, listener, senders in _sockets():
            for each in (listener, *senders):
                transport, _ = await loop.create_datagram_endpoint(lambda: beacon, sock=each)
                opened.append(transport)
                if each is not listener:
                    beacon.add(transport, group)
        yield beacon
    finally:
        for transport in opened:
            transport.close()


def _sockets() -> Iterator[tuple[str, socket.socket, list[socket.socket]]]:
    """Yield for IPv4 and IPv6 the group, a socket that hears it, and those that send to it."""
    interfaces = psutil.net_if_addrs()
    v4 = [at.address for each in interfaces.values() for at in each if at.family == socket.AF_INET]
    v6 = [
        name
        for name, each in interfaces.items()
        if any(at.family == socket.AF_INET6 for at in each)
    ]
    if v4 and (listener := _listener(socket.AF_INET, "")):
        member = [_join_v4(listener, address) for address in v4]
        yield GROUP_V4, listener, [each for each in member if each]
    if socket.has_ipv6 and v6 and (listener := _listener(socket.AF_INET6, "::")):
        member = [_join_v6(listener, name) for name in v6]
        yield GROUP_V6, listener, [each for each in member if each]


def _listener(family: socket.AddressFamily, host: str) -> socket.socket | None:
    listener = socket.socket(family, socket.SOCK_DGRAM)
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # every node of this machine
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        listener.bind((host, PORT))
    except OSError as error:
        logger.info("no beacons are heard: %s", error)
        listener.close()
        return None
    return listener


def _join_v4(listener: socket.socket, address: str) -> socket.socket | None:
    own = socket.inet_aton(address)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setblocking(False)
    try:
        listener.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP_V4) + own
        )
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
    except OSError:  # an interface without multicast
        sender.close()
        return None
    return sender


def _join_v6(listener: socket.socket, name: str) -> socket.socket | None:
    sender = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sender.setblocking(False)
    try:
        index = struct.pack("@I", socket.if_nametoindex(name))
        group = socket.inet_pton(socket.AF_INET6, GROUP_V6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + index)
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    except OSError:
        sender.close()
        return None
    return sender
