"""Nodes in the homes and on the public segment of a street, with a relay."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshllm_quic.wire.packets import Relayed
from tests.processes.capture import Capture, Passed
from tests.processes.fleet import ALONE, MESHLLM, WAIT_S, Done, Fleet, Node, environment, until
from tests.processes.namespaces import RELAY, RELAY_BESIDE, Router, Space, Street, open_street, run

ATTIC, BENCH, CELLAR = "attic", "bench", "cellar"
"""In home one, in home two, and on the public segment."""
RELAY_PLACE = f"{RELAY}:8790"
QUIC = ("--transport", "quic", *ALONE)
PORT = 7700
QUIET_S = 1.0
"""Two beats of every link."""


@dataclass
class Residents:
    """The nodes of one test, and the relay."""

    street: Street
    fleet: Fleet
    _relay: "subprocess.Popen[bytes] | None" = None

    def home(self, name: str) -> Space:
        """Return where a node of that name lives."""
        homes = {ATTIC: self.street.one, BENCH: self.street.two, CELLAR: self.street.relay}
        return homes[name]

    def node(self, name: str) -> Node:
        """Return the node of a name; a new one is not yet started."""
        host = RELAY_BESIDE if name == CELLAR else "0.0.0.0"
        return self.fleet.node(name, f"{host}:{PORT}")

    def settle(self, *names: str) -> float:
        """Start nodes, the first as the founder behind the relay; return seconds to their ring."""
        founder, *guests = map(self.node, names)
        begin = time.monotonic()
        self.start(founder, "--relay", RELAY_PLACE, "--members", str(len(names)))
        until(lambda: bool(founder.is_running and founder.stdout), self.fleet.told)
        ticket = founder.stdout.split()[0]
        for guest in guests:
            self.start(guest, "--join", ticket)
        self.fleet.form()
        return time.monotonic() - begin

    def start(self, node: Node, *options: str) -> None:
        """Start a node where it lives."""
        with self.home(node.name).entered():
            node.start(*QUIC, *options, root=("-v",))

    def start_relay(self) -> None:
        """Start the relay, and wait until it is ready."""
        said = self.fleet.folder / "relay"
        words = self.street.relay.python(*MESHLLM, "relay", "--listen", RELAY_PLACE)
        with said.open("wb") as out:
            self._relay = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment()
            )
        until(lambda: "--relay" in said.read_text(), said.read_text)

    def kill_relay(self) -> None:
        """End the relay as a power cut would."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()

    @contextmanager
    def without_relay(self) -> Iterator[None]:
        """Kill the relay, and start it again."""
        self.kill_relay()
        try:
            yield
        finally:
            self.start_relay()

    def paths(self, name: str) -> dict[str, str]:
        """Return the paths of a node to the others, by name."""
        nodes = self.node(name).status().get("nodes", ())
        return {each["name"]: each["link"]["path"] for each in nodes if each["link"]}

    def command(self, name: str, *words: str) -> Done:
        """Run a command for a node, where it lives."""
        state = str(self.node(name).state)
        return subprocess.run(
            self.home(name).python(*MESHLLM, *words, "--state", state),
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
            env=environment(),
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """QUIC datagrams at the router of home one, sent directly to home two or to the relay."""

    capture: Capture
    street: Street

    def direct(self, since: float = 0.0) -> list[Passed]:
        """List the datagrams of QUIC between the two routers."""
        hosts = self.street.router_of_one.host, self.street.router_of_two.host
        return [each for each in self.capture.between(*hosts, since) if each.first & 0x40]

    def relayed(self, since: float = 0.0) -> list[Passed]:
        """List the datagrams that the relay forwards."""
        hosts = self.street.router_of_one.host, RELAY
        return [each for each in self.capture.between(*hosts, since) if each.first == Relayed.KIND]

    def settle(self) -> float:
        """Wait until nothing was relayed for a moment; return the seconds."""
        begin = time.monotonic()

        def is_quiet() -> bool:
            since = time.monotonic() - QUIET_S
            return since >= begin and not self.relayed(since)

        return until(is_quiet)


@contextmanager
def open_residents(one: Router, two: Router, fleet: Fleet) -> Iterator[Residents]:
    """Build a street with a relay in it, and end what runs in it."""
    with open_street(one, two) as street:
        residents = Residents(street, fleet)
        try:
            residents.start_relay()
            yield residents
        finally:
            residents.kill_relay()


@contextmanager
def renumbered(router: Space, new: str) -> Iterator[None]:
    """Give a router another public address, as a provider does at night, and its own again."""
    _readdress(router, router.host, new)
    try:
        yield
    finally:
        _readdress(router, new, router.host)


def block_udp(router: Space) -> None:
    """Let a router drop all UDP."""
    rule = "insert rule ip filter passing meta l4proto udp drop"
    run(*router.command("nft", *rule.split()))


def _readdress(router: Space, old: str, new: str) -> None:
    lines = [f"address delete {old}/24 dev wan", f"address add {new}/24 dev wan"]
    run("ip", "-n", router.name, "-batch", "-", stdin="\n".join(lines))
