"""Discovery of nodes of the mesh on the local network, by multicast.

A beacon is one datagram: a magic word, a nonce, and the sender's node id and addresses, encrypted.
Without the key, beacons of different meshes cannot be told apart. A beacon is only a hint where to
dial: the handshake authenticates the peer, and names of hosts are ignored. A node sends a beacon
when it starts, then at doubling intervals, and in reply to the first beacon of an unknown node.

The beacons of members are sealed to the members that the sender knows, signed, and show its
credential (`protocol.trust.announcement`): a removed member, which knows the mesh id, reads none
and gets no answer. The queries of clients, which know few nodes, can be read by all who know the
mesh id. To read one takes half a millisecond, so none is read twice, and only so many in a second.

A beacon without addresses is a query, and is answered to its sender. A guest sends queries under
the key of its ticket, which the inviter can decrypt while the ticket is open.
"""

import asyncio
import json
import logging
import os
import socket
import struct
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Protocol

import psutil  # type: ignore[import-untyped]  # ships no types
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.names import NODE_ID_BYTES, NodeId
from meshllm.node.net.peer_address import LocalAddressPolicy, is_literal, own_hosts, permitted
from meshllm.node.timer import loop_time
from meshllm.protocol.trust.announcement import (
    announce,
    is_announcement,
    read_announcement,
    sealed_bytes,
)
from meshllm.protocol.trust.credential import Credential, Removals, Role, check
from meshllm.protocol.trust.identity import NodeKey

GROUP_V4 = "239.255.77.77"  # organisation-local, RFC 2365
GROUP_V6 = "ff12::6d65:7368"  # link-local, transient, RFC 4291 section 2.7
PORT = 7701
MAGIC = b"meshllm beacon 1"
NONCE_BYTES = 12
MAX_BEACON_BYTES = 1200  # fits every link without fragmentation
MAX_TEXT_BYTES = MAX_BEACON_BYTES // 2  # of the addresses
MAX_SHOWN_BYTES = 320  # of a credential: two invitations; leaves room for readers
MAX_QUERY_BYTES = 960  # of the credential of a client, whose query has no readers or addresses
MAX_ADDRESSES = 16
MAX_SEEN = 4096  # beacons that were read, by their nonces
READS_PER_S, MAX_READS = 50.0, 200.0  # beacons that are read, in the long run and at once
MAX_KNOWN = 1024  # nodes that got a reply; a member may invent some
ANSWER_S = 0.2  # s between two answers, and between two decryptions of unknown datagrams
FIRST_S, LAST_S = 0.5, 30.0  # s between beacons, doubling; a new node sends one at its start

_CONTEXT = "meshllm 2026-11 beacon"

Heard = Callable[[NodeId, tuple[str, ...]], None]
Guests = Callable[[], Iterable[bytes]]
"""Returns the pre-shared keys of open tickets; called for datagrams of unknown senders."""

logger = logging.getLogger(__name__)


class BeaconCode(Protocol):
    """Encodes and decodes the beacons of a node."""

    def seal(self, addresses: Sequence[str], to: NodeId | None) -> list[bytes]:
        """Encode a beacon for all who may read it, or for one node."""
        ...

    def read(self, beacon: bytes) -> tuple[NodeId, tuple[str, ...]] | None:
        """Return the sender and its addresses; None if this is not a beacon for this node."""
        ...


class JoinerBeacons:
    """Beacons under the pre-shared key of a ticket."""

    def __init__(self, psk: bytes, me: NodeId) -> None:
        self._cipher = AESGCM(blake3(psk, derive_key_context=_CONTEXT).digest())
        self._me = me

    def seal(self, addresses: Sequence[str], to: NodeId | None) -> list[bytes]:
        """Encode a beacon for all who know the ticket, with as many addresses as fit."""
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, self._me + _text(addresses), MAGIC)
        return [MAGIC + nonce + sealed]

    def read(self, beacon: bytes) -> tuple[NodeId, tuple[str, ...]] | None:
        """Return the sender and its addresses; None if this is not a beacon under this key."""
        if len(beacon) > MAX_BEACON_BYTES or not beacon.startswith(MAGIC):
            return None
        rest = beacon[len(MAGIC) :]
        try:
            plain = self._cipher.decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], MAGIC)
        except (InvalidTag, ValueError):
            return None
        addresses = _addresses(plain[NODE_ID_BYTES:])
        return None if addresses is None else (NodeId(plain[:NODE_ID_BYTES]), addresses)


class ReadLimit:
    """Limits how many beacons are read."""

    def __init__(self) -> None:
        self._seen: dict[bytes, None] = {}
        self._reads, self._at = MAX_READS, time.monotonic()

    def admits(self, nonce: bytes) -> bool:
        """Return whether to read the beacon with a nonce: it is new, and not one too many."""
        now = time.monotonic()
        self._reads = min(MAX_READS, self._reads + (now - self._at) * READS_PER_S)
        self._at = now
        if nonce in self._seen or self._reads < 1:
            return False
        self._reads -= 1
        self._seen[nonce] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return True


class MemberBeacons:
    """Beacons among the members of a mesh.

    ``members`` returns those that are known here, and ``met`` those that were members when they
    were met, in case nobody else is known.
    """

    def __init__(
        self,
        key: NodeKey,
        credential: Credential,
        members: Callable[[], Collection[NodeId]],
        removals: Removals,
        met: Callable[[], Collection[NodeId]] = tuple,
    ) -> None:
        self._key, self._credential = key, credential
        self._members, self._removals, self._met = members, removals, met
        self._limit = ReadLimit()

    def seal(self, addresses: Sequence[str], to: NodeId | None) -> list[bytes]:
        """Encode a beacon for the known members, in as many parts as needed, or for one node."""
        gone = {*self._removals, self._key.node}
        known = (*self._members(), *self._met()) if to is None else (to,)
        readers = [each for each in dict.fromkeys(known) if each not in gone]
        payload = self._payload(addresses)
        if self._credential.role is Role.CLIENT:
            return [self._sealed((), payload)]
        left = MAX_BEACON_BYTES - len(MAGIC) - NONCE_BYTES - sealed_bytes(0, len(payload))
        room = left // (sealed_bytes(1, 0) - sealed_bytes(0, 0))
        parts = [readers[at : at + room] for at in range(0, len(readers), room)]
        return [self._sealed(part, payload) for part in parts]

    def read(self, beacon: bytes) -> tuple[NodeId, tuple[str, ...]] | None:
        """Return the sender, a member, and its addresses."""
        if len(beacon) > MAX_BEACON_BYTES or not beacon.startswith(MAGIC):
            return None
        nonce, sealed = beacon[len(MAGIC) :][:NONCE_BYTES], beacon[len(MAGIC) + NONCE_BYTES :]
        if not is_announcement(self._credential.mesh, nonce, sealed):
            return None
        if not self._limit.admits(nonce):
            return None
        read = read_announcement(self._key, self._credential.mesh, nonce, sealed)
        if read is None:
            return None
        node, payload = read
        size = int.from_bytes(payload[:2], "little")
        addresses = _addresses(payload[2 + size :])
        is_valid = addresses is not None and self._is_member(node, payload[2:][:size])
        return (node, addresses) if addresses is not None and is_valid else None

    def _sealed(self, readers: Sequence[NodeId], payload: bytes) -> bytes:
        random = os.urandom(NONCE_BYTES + 48)
        sealed = announce(self._key, self._credential.mesh, readers, payload, random)
        return MAGIC + random[:NONCE_BYTES] + sealed

    def _payload(self, addresses: Sequence[str]) -> bytes:
        """Return the credential, unless it is too long, and as many addresses as fit."""
        shown, text = self._credential.encode(), _text(addresses)
        is_client = self._credential.role is Role.CLIENT
        if len(shown) > (MAX_QUERY_BYTES if is_client else MAX_SHOWN_BYTES):
            shown = b""  # those who know this node believe it without
        return len(shown).to_bytes(2, "little") + shown + text

    def _is_member(self, node: NodeId, shown: bytes) -> bool:
        if node in self._removals:
            return False
        if not shown:
            return node in self._members()
        try:
            credential = Credential.decode(shown)
            check(credential, node, self._credential.mesh, time.time(), self._removals)
        except (PeerFault, NotAuthorised):
            return False
        return True


class Beacon(asyncio.DatagramProtocol):
    """Announces the addresses of this node, and receives those of others."""

    def __init__(self, code: BeaconCode, me: NodeId, heard: Heard, guests: Guests = tuple) -> None:
        self.addresses: tuple[str, ...] = ()
        """Where this node can be dialled; while empty, its beacons are queries."""
        self._code = code
        self._me = me
        self._heard = heard
        self._guests = guests
        self._answered = self._looked = -ANSWER_S
        self._known: set[NodeId] = set()
        self._hosts = frozenset[str]()  # of this machine, when the sockets were opened
        self._opened: list[asyncio.DatagramTransport] = []
        self._transports: dict[asyncio.DatagramTransport, tuple[str, int]] = {}

    async def open(self) -> None:
        """Open the sockets again, on the multicast interfaces that this machine has now."""
        self.close()
        await asyncio.sleep(0)  # which closes the sockets, so that their port is free
        self._hosts, loop = own_hosts(), asyncio.get_running_loop()
        for group, listener, senders in _sockets():
            for each in (listener, *senders):
                transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=each)
                self._opened.append(transport)
                if each is not listener:
                    self.add(transport, group)

    def close(self) -> None:
        """Close all sockets."""
        for transport in self._opened:
            transport.close()
        self._opened, self._transports = [], {}

    def add(self, transport: asyncio.DatagramTransport, group: str) -> None:
        """Send on one more interface."""
        self._transports[transport] = group, PORT

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        """Handle a beacon; only one from this machine may name addresses of this machine."""
        match self._code.read(data):
            case (node, ()) if node != self._me:
                self._answer(self._code, node)
            case (node, addresses) if node != self._me:
                if node not in self._known and len(self._known) < MAX_KNOWN and self.addresses:
                    self._known.add(node)
                    self.send(to=node)
                local = (
                    LocalAddressPolicy.YES
                    if source[0].partition("%")[0] in own_hosts()
                    else LocalAddressPolicy.NO
                )
                self._heard(node, tuple(filter(is_literal, permitted(addresses, local))))
            case None:
                self._answer_guest(data)

    def _answer_guest(self, data: bytes) -> None:
        """Answer the query of a guest; rate-limited against floods of invalid datagrams."""
        now = loop_time()
        if self.addresses and data.startswith(MAGIC) and now >= self._looked + ANSWER_S:
            self._looked = now
            codes = (JoinerBeacons(psk, self._me) for psk in self._guests())
            if asked := next((code for code in codes if code.read(data)), None):
                self._answer(asked)

    def _answer(self, code: BeaconCode, to: NodeId | None = None) -> None:
        now = loop_time()
        if self.addresses and now >= self._answered + ANSWER_S:
            self._answered = now
            self.send(code, to)

    def error_received(self, exc: Exception) -> None:
        """Log that an interface cannot send multicast."""
        logger.debug("cannot send a beacon: %s", exc)

    def send(self, code: BeaconCode | None = None, to: NodeId | None = None) -> None:
        """Send one beacon on every interface, to all who may read it or to one node."""
        for beacon in (code or self._code).seal(self.addresses, to):
            for transport, group in self._transports.items():
                transport.sendto(beacon, group)

    async def run(self, longest_s: float = LAST_S) -> None:
        """Send beacons until cancelled, on the interfaces that this machine has by then."""
        pause = FIRST_S
        try:
            while True:
                if own_hosts() != self._hosts:
                    await self._reopen()
                self.send()
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest_s)
        finally:
            self.close()  # what was opened after the context had ended

    async def _reopen(self) -> None:
        try:
            await self.open()
        except OSError as error:
            self._hosts = frozenset()  # so that the next beacon tries again
            logger.info("cannot open the sockets of beacons: %s", error)


@asynccontextmanager
async def open_beacon(
    code: BeaconCode, me: NodeId, heard: Heard, guests: Guests = tuple
) -> AsyncIterator[Beacon]:
    """Listen for beacons on every multicast interface inside the context."""
    beacon = Beacon(code, me, heard, guests)
    try:
        await beacon.open()
        yield beacon
    finally:
        beacon.close()


def _text(addresses: Sequence[str]) -> bytes:
    """Encode as many addresses as fit."""
    kept = list(addresses[:MAX_ADDRESSES])
    while len(text := json.dumps(kept).encode()) > MAX_TEXT_BYTES:
        kept.pop()
    return text


def _addresses(text: bytes) -> tuple[str, ...] | None:
    """Decode addresses; None if they are malformed."""
    try:
        addresses = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(addresses, list) or not all(isinstance(at, str) for at in addresses):
        return None
    return tuple(addresses[:MAX_ADDRESSES])


def _sockets() -> Iterator[tuple[str, socket.socket, list[socket.socket]]]:
    """Yield for IPv4 and IPv6 the group, a receiving socket, and the sending sockets."""
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
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # several nodes per machine
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        listener.bind((host, PORT))
    except OSError as error:
        logger.info("cannot receive beacons: %s", error)
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
