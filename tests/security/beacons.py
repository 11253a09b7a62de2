"""Datagrams of strangers to the port of beacons."""

import asyncio
import os
import socket
from functools import partial

from meshllm.names import NodeId
from meshllm.node.net.beacon import MAGIC, MAX_BEACON_BYTES, NONCE_BYTES, PORT, JoinerBeacons
from tests.processes.fleet import open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.owner import slowed
from tests.security.stranger import running

IN_A_ROW = 100
FORGED = 50  # different ones, which are replayed


def inject_beacons() -> Outcome:
    """Send forged and replayed beacons without end to a node that listens for them."""
    with open_fleet() as fleet:
        fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin")
        fleet.form()
        mesh = bytes.fromhex(owner.status()["mesh"])
        outcome = slowed(owner, lambda: running(partial(_inject, mesh)))
        known = len(owner.status()["nodes"])
    held = outcome.held and known == 1
    return Outcome(f"{outcome.effect}, {known - 1} believed", outcome.bound, held=held)


async def _inject(mesh: bytes) -> None:
    """Use all that a former member knows: the id of the mesh, from which the old keys came."""
    authors, size = [NodeId(os.urandom(32)) for _ in range(FORGED)], MAX_BEACON_BYTES - len(MAGIC)
    forged = [
        beacon
        for author in authors
        for beacon in JoinerBeacons(mesh, author).seal(("ws://192.0.2.1:9",), None)
    ]
    forged += [MAGIC + os.urandom(size) for _ in range(FORGED)]
    forged += [MAGIC + bytes(NONCE_BYTES), MAGIC, b""]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        while True:
            for number in range(IN_A_ROW):
                sender.sendto(forged[number % len(forged)], ("127.0.0.1", PORT))
            await asyncio.sleep(0)


ATTACKS = (
    Attack("forged beacons", "not known", inject_beacons),
)  # fmt: skip
