"""Strangers that hold the places of unauthenticated connections and say nothing.

``python -m tests.security.api_servers`` lets those of an IPv6 network do that, in a network
namespace.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from meshllm.errors import MeshError
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.credential import Role
from tests.processes.fleet import ALONE, environment, free_address, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.member import join
from tests.security.owner import slowed

HOSTS = [f"127.0.{network}.{number}" for network in (7, 8) for number in range(1, 5)]
NETWORK = "fd00:7::/32"
HOSTS_IPV6 = [f"fd00:7:0:{network}::{number}" for network in range(4) for number in range(2, 18)]
IPV6_FREEBIND = 78  # linux/in6.h; bind to an address of a local network
NAMESPACE_S = 300.0
PLACES = 64  # of a listener
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
RATE_S = 1 / 8  # s between two upgrades: 1.3 kB/s
TRIES = 20
JOIN_S = 5.0  # s for one joiner
SETTLE_S = 3.0  # s until all places are held


def silent_upgrades() -> Outcome:
    """Hold all places from eight hosts, renew them, and let others join."""
    return _silent(HOSTS, "127.0.0.1")


def silent_upgrades_of_ipv6() -> Outcome:
    """The same from 64 addresses of an IPv6 /48."""
    within = ["unshare", "--net"]
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        return Outcome("skipped: needs a network namespace", "none", held=True)
    done = subprocess.run(
        [*within, sys.executable, "-m", "tests.security.api_servers"],
        capture_output=True,
        text=True,
        check=False,
        timeout=NAMESPACE_S,
        env=environment(),
    )
    effect = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    return Outcome(effect, "none, 2 times", held=done.returncode == 0)


def main() -> None:
    """Attack over IPv6 in a network namespace, and print the effect."""
    own = "-6 address add fd00:7::1/128 dev lo nodad"
    for words in ("link set lo up", f"-6 route add local {NETWORK} dev lo", own):
        subprocess.run(["ip", *words.split()], check=True)
    outcome = _silent(HOSTS_IPV6, "[fd00:7::1]")
    print(outcome.effect)
    sys.exit(not outcome.held)


def _silent(hosts: Sequence[str], target: str) -> Outcome:
    with open_fleet() as fleet:
        port = int(free_address("[::1]" if ":" in target else target).rpartition(":")[2])
        fleet.node("owner", f"{target}:{port}")
        fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", *ALONE)
        fleet.form()
        invitation = StateStore.open(owner.state).invite(
            (f"ws://{owner.address}",), Role.CLIENT, lasts_s=3600, uses=None
        )

        def join_often() -> Outcome:
            failed = TRIES - asyncio.run(_join_often(invitation.encode(), fleet.folder))
            return Outcome(f"{failed} of {TRIES} joins failed", "none", held=not failed)

        return slowed(owner, lambda: _holding((target.strip("[]"), port), hosts), join_often)


@contextmanager
def _holding(target: tuple[str, int], hosts: Sequence[str]) -> Iterator[None]:
    stop, held = Event(), list[socket.socket]()
    thread = Thread(target=_hold, args=(target, hosts, stop, held))
    thread.start()
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        stop.set()
        thread.join()
        for each in held:
            each.close()


def _hold(
    target: tuple[str, int], hosts: Sequence[str], stop: Event, held: list[socket.socket]
) -> None:
    """Open connections from every host, all at once and then one after the other."""
    number = 0
    while not stop.wait(RATE_S if number > PLACES else 0):
        number += 1
        source = hosts[number % len(hosts)]
        each = socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET)
        if ":" in source:
            each.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        each.bind((source, 0))
        try:
            each.connect(target)
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


ATTACKS = (
    Attack("8 hosts of silent WebSockets", "39 of 40 links failed", silent_upgrades),
    Attack("an IPv6 /48 of silent WebSockets", "not known", silent_upgrades_of_ipv6),
)

if __name__ == "__main__":
    main()
