"""Strangers that hold the places of unauthenticated connections and say nothing."""

import asyncio
import socket
import time
from pathlib import Path
from threading import Event, Thread

from meshllm.errors import MeshError
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.credential import Role
from tests.processes.fleet import ALONE, free_address, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.member import join

HOSTS = [f"127.0.{network}.{number}" for network in (7, 8) for number in range(1, 5)]
PLACES = 64  # of a listener
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
RATE_S = 1 / 8  # s between two upgrades: 1.3 kB/s
TRIES = 20
JOIN_S = 5.0  # s for one joiner


def silent_upgrades() -> Outcome:
    """Hold all places from eight hosts, renew them, and let others join."""
    with open_fleet() as fleet:
        host, _, port = free_address("127.0.0.1").rpartition(":")
        fleet.node("owner", f"{host}:{port}")
        fleet.found("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        invitation = StateStore.open(owner.state).invite(
            (f"ws://{owner.address}",), Role.CLIENT, lasts_s=3600, uses=None
        )
        stop, held = Event(), list[socket.socket]()
        thread = Thread(target=_hold, args=(int(port), stop, held))
        thread.start()
        try:
            time.sleep(3)
            joined = asyncio.run(_join_often(invitation.encode(), fleet.folder))
        finally:
            stop.set()
            thread.join()
            for each in held:
                each.close()
    return Outcome(f"{TRIES - joined} of {TRIES} joins failed", "none", held=joined == TRIES)


def _hold(port: int, stop: Event, held: list[socket.socket]) -> None:
    """Open connections from every host, all at once and then one after the other."""
    number = 0
    while not stop.wait(RATE_S if number > PLACES else 0):
        number += 1
        each = socket.socket()
        each.bind((HOSTS[number % len(HOSTS)], 0))
        try:
            each.connect(("127.0.0.1", port))
            each.sendall(UPGRADE)
        except OSError:
            each.close()
        else:
            held.append(each)


async def _join_often(ticket: str, folder: Path) -> int:
    joined = 0
    for number in range(TRIES):
        try:
            async with asyncio.timeout(JOIN_S), join(ticket, folder / f"guest-{number}"):
                joined += 1
        except (MeshError, TimeoutError):
            continue
    return joined


ATTACKS = (Attack("8 hosts of silent WebSockets", "39 of 40 links failed", silent_upgrades),)
