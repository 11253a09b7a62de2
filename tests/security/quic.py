"""Strangers that speak QUIC: half-open connections, and data after a handshake of TLS alone."""

import asyncio
import os
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from aioquic.quic.connection import QuicConnection

from meshllm.errors import MeshError
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.credential import Role
from meshllm_quic.base.identity import Identity
from meshllm_quic.link.machine import PEER, ConnectionMachine
from meshllm_quic.net.network import Address
from meshllm_quic.net.udp import UdpNetwork
from meshllm_quic.transport import QuicTransport
from tests.processes.fleet import ALONE, Node, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.member import join
from tests.security.owner import slowed
from tests.security.stranger import STOP_S, running

HOSTS = [f"127.0.9.{number}" for number in range(1, 5)]
EACH = 64  # half-open connections of each host
RENEW_S = 0.5
TRIES, JOIN_S = 10, 5.0  # joins, and s for each
STREAM_BYTES = 60_000  # before a handshake of meshllm 64 KiB may arrive
BURST = 50  # pings and resets in a row
QUIC = ("--transport", "quic")


def half_open_connections() -> Outcome:
    """Renew 64 half-open connections from each of four hosts, and let others join."""
    with open_fleet() as fleet:
        fleet.create_mesh("owner", f"quic://{fleet.node('owner').address}")
        owner = fleet.node("owner").start("--model", "builtin", *QUIC, *ALONE)
        fleet.form()

        def join_often() -> Outcome:
            failed = TRIES - asyncio.run(_join_often(_ticket(owner), fleet.folder))
            return Outcome(f"{failed} of {TRIES} joins failed", "none", held=not failed)

        return slowed(owner, lambda: running(partial(_knock, _port(owner))), join_often)


def data_after_tls() -> Outcome:
    """Finish TLS with a key of no member, then send junk, pings and streams without end."""
    with open_fleet() as fleet:
        fleet.create_mesh("owner", f"quic://{fleet.node('owner').address}")
        owner = fleet.node("owner").start("--model", "builtin", *QUIC, *ALONE)
        fleet.form()
        return slowed(owner, lambda: running(partial(_talk, _port(owner))))


def _port(owner: Node) -> int:
    return int(owner.address.rpartition(":")[2])


def _ticket(owner: Node) -> str:
    at = (f"quic://{owner.address}",)
    return StateStore.open(owner.state).invite(at, Role.CLIENT, lasts_s=3600, uses=None).encode()


async def _join_often(ticket: str, folder: Path) -> int:
    joined = 0
    for number in range(TRIES):
        with suppress(MeshError, TimeoutError):
            state = folder / f"guest-{number}"
            async with asyncio.timeout(JOIN_S), join(ticket, state, QuicTransport()):
                joined += 1
    return joined


async def _knock(port: int) -> None:
    """Open connections and answer nothing."""
    random = Random(1)
    sockets = [await UdpNetwork().open(host, 0, lambda _: None) for host in HOSTS]
    while True:
        for each in sockets:
            for _ in range(EACH):
                machine = ConnectionMachine(
                    Identity(random.randbytes(32)).configure(is_client=True)
                )
                machine.connect(PEER, now=0.0)
                each.send([machine.datagrams_to_send(now=0.0)[0][0]], ("127.0.0.1", port))
            await asyncio.sleep(RENEW_S / len(sockets))


async def _talk(port: int) -> None:
    while True:
        stranger = _Stranger(("127.0.0.1", port))
        await stranger.run()


class _Stranger:
    """One connection of a key without a membership."""

    def __init__(self, to: Address) -> None:
        configuration = Identity(os.urandom(32)).configure(is_client=True)
        configuration.verify_mode = ssl.CERT_NONE
        self._quic = QuicConnection(configuration=configuration)
        self._to = to
        self._pings = 0

    async def run(self) -> None:
        """Send until it is closed, or for a while."""
        self._socket = await UdpNetwork().open("127.0.0.1", 0, self._receive)
        self._quic.connect(self._to, now=time.monotonic())
        end = time.monotonic() + STOP_S
        while self._quic._close_event is None and time.monotonic() < end:
            if self._quic._handshake_complete:
                self._flood()
            self._transmit()
            await asyncio.sleep(0.001)
        self._socket.close()

    def _flood(self) -> None:
        if not self._pings:
            self._quic.send_stream_data(0, bytes(STREAM_BYTES))
        for _ in range(BURST):
            self._pings += 1
            self._quic.send_ping(self._pings)
            self._transmit()

    def _transmit(self) -> None:
        for datagram, _ in self._quic.datagrams_to_send(time.monotonic()):
            self._socket.send([datagram], self._to)

    def _receive(self, batch: Sequence[tuple[bytes, Address]]) -> None:
        for datagram, _ in batch:
            self._quic.receive_datagram(datagram, self._to, now=time.monotonic())


ATTACKS = (
    Attack("4 hosts of half-open QUIC", "no join in 25 s", half_open_connections),
    Attack("QUIC data after TLS", "not known", data_after_tls),
)
