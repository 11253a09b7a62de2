"""Faults of real processes, in network namespaces where this machine allows them.

In namespaces every node has an address of its own on a shaped network, and its state folder is a
small disk, so that paths can be cut, delayed and made to lose packets, and the disk can be full.
Elsewhere the nodes listen on loopback, and only faults of processes can be made.

On a ground with a relay, one node is hidden: no packet passes between it and the others, but all
reach the relay. Then the only fault is the death of that relay.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.far import Change, changing
from tests.plugins.quic.shaper import can_shape
from tests.processes.fleet import MESHLLM, Fleet, Node, environment, until
from tests.processes.namespaces import Space, new_spaces, open_spaces, run
from tests.simulation.wires import Line

PORT = 7700
STATE_BYTES = "4m"
NETWORK_S = 8.0  # s of a fault of the network
GAP_S = 1.0  # s; a shorter one, in which nobody is taken for lost
DISK_S = 5.0
CALM = Line()
SLOW = Line(delay_s=0.2)
LOSSY = Line(loss=0.05)
STOPS_S = {"stop 1": 1.0, "stop": 2.0, "stop 5": 5.0, "stop 20": 20.0}
OF_PROCESSES = ("kill", "restart", *STOPS_S, "leave", "join")
RELAY = "relay"
RELAY_PORT = 8790
OF_NETWORKS = ("gap", "cut", "one way", "partition", "delay", "drop", "disk")
ENDS_PROCESS = frozenset({"kill", "leave"})
"""After these faults the victim is not running."""
IS_NEW = ENDS_PROCESS | {"restart", "join"}
"""After these, what it has counted is gone."""


@dataclass
class Relay:
    """A relay in a namespace of its own."""

    space: Space
    said: Path
    """What it has written."""
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def place(self) -> str:
        """Return where it listens."""
        return f"{self.space.host}:{RELAY_PORT}"

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        words = self.space.python(*MESHLLM, "relay", "--listen", self.place)
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment()
            )
        until(lambda: "--relay" in self.said.read_text(), self.said.read_text)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Ground:
    """Where nodes run, and what may happen to them there."""

    fleet: Fleet
    spaces: dict[str, Space]
    """By the name of the node; none on loopback."""
    change: Change | None = None
    lacks: str = ""
    """Why there are no namespaces."""
    relay: Relay | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults that can be made."""
        if self.relay is not None:
            return (RELAY,)
        return (*OF_PROCESSES, *(OF_NETWORKS if self.spaces else ()))

    @property
    def options(self) -> tuple[str, ...]:
        """The options with which nodes start here."""
        return ("--transport", "quic", "--relay", self.relay.place) if self.relay else ()

    def ticket(self, name: str) -> str:
        """Create a founder, and return a ticket of its mesh."""
        address = f"{'quic' if self.relay else 'ws'}://{self.node(name).address}"
        return self.fleet.create_mesh(name, address)

    def node(self, name: str) -> Node:
        """Return a node at its address."""
        space = self.spaces.get(name)
        return self.fleet.node(name, f"{space.host}:{PORT}" if space else None)

    def start(self, name: str, *options: str) -> None:
        """Start a node, in its namespace if it has one."""
        space = self.spaces.get(name)
        within = tuple(space.command()) if space else ()
        self.node(name).start(*options, *self.options, within=within)

    @contextmanager
    def hiding(self, name: str) -> Iterator[None]:
        """Let packets of a node reach others by the relay only."""
        assert self.change is not None
        self.change(CALM, self._cuts("cut", name))
        try:
            until(lambda: self._is_relayed(name), self.fleet.told)
            yield
        finally:
            self.change(CALM)

    def _is_relayed(self, name: str) -> bool:
        others = [each for each in self.node(name).status()["nodes"] if each["name"] != name]
        links = [each["link"] for each in others]
        return bool(links) and all(link and link["path"] == "relay" for link in links)

    def strike(self, fault: str, victim: str, restart: Callable[[str], None]) -> float:
        """Let a fault happen, to its end; return how long the process took to leave.

        ``restart`` starts the victim again, which has left before it can join.
        """
        node = self.node(victim)
        if fault in STOPS_S:
            node.send(signal.SIGSTOP)
            time.sleep(STOPS_S[fault])
            node.send(signal.SIGCONT)
        elif fault == "leave":
            return leave(node)
        elif fault == "join":
            restart(victim)
        elif fault == "disk":
            self._fill(node)
        elif self.relay is not None:
            self.relay.kill()
            time.sleep(NETWORK_S)
            self.relay.start()
        elif fault in OF_NETWORKS:
            self._disturb(fault, victim)
        else:
            node.kill()
            if fault == "restart":
                restart(victim)
        return 0.0

    def _disturb(self, fault: str, victim: str) -> None:
        assert self.change is not None  # else the fault is not offered
        line = {"delay": SLOW, "drop": LOSSY}.get(fault, CALM)
        self.change(line, self._cuts(fault, victim))
        time.sleep(GAP_S if fault == "gap" else NETWORK_S)
        self.change(CALM)

    def _cuts(self, fault: str, victim: str) -> list[tuple[Space, Space]]:
        """Return the paths that a fault cuts: those of the victim, or of it and another node."""
        names = sorted(self.spaces)
        near = {victim}
        if fault == "partition":
            near.add(names[names.index(victim) - 1])
        away = [
            (self.spaces[one], self.spaces[other])
            for one in near
            for other in names
            if other not in near
        ]
        match fault:
            case "one way":
                return away
            case "gap" | "cut" | "partition":
                return [*away, *((other, one) for one, other in away)]
            case _:
                return []

    def _fill(self, node: Node) -> None:
        """Fill the disk of a node for a while."""
        ballast = node.state / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            time.sleep(DISK_S)
        finally:
            ballast.unlink()


def leave(node: Node) -> float:
    """Tell a node to leave; return how long that takes, s."""
    began = time.monotonic()
    node.send(signal.SIGTERM)
    if code := node.ended():
        raise RuntimeError(f"{node.name} left with exit status {code}")
    return time.monotonic() - began


@contextmanager
def open_ground(fleet: Fleet, names: Sequence[str], *, has_relay: bool = False) -> Iterator[Ground]:
    """Make a place for nodes of these names."""
    with ExitStack() as stack:
        try:
            ground = _spacious(fleet, names, stack, has_relay=has_relay)
        except _Lacking as error:
            ground = Ground(fleet, {}, lacks=str(error))
        yield ground


class _Lacking(Exception):
    """This machine has no namespaces."""


def _spacious(fleet: Fleet, names: Sequence[str], stack: ExitStack, *, has_relay: bool) -> Ground:
    missing = [tool for tool in ("ip", "mount") if shutil.which(tool) is None]
    if why := f"`{missing[0]}` is not installed" if missing else can_shape():
        raise _Lacking(why)
    if os.geteuid():
        raise _Lacking("namespaces need root")
    spaces = new_spaces(len(names) + has_relay)
    try:
        stack.enter_context(open_spaces(*spaces))
        change = stack.enter_context(changing(spaces))
        change(CALM)
        relay = Relay(spaces[-1], fleet.folder / RELAY) if has_relay else None
        ground = Ground(fleet, dict(zip(names, spaces, strict=False)), change, relay=relay)
        for name in names:
            state = ground.node(name).state
            state.mkdir(mode=0o700)
            run("mount", "-t", "tmpfs", "-o", f"size={STATE_BYTES},mode=0700", "tmpfs", str(state))
            stack.callback(run, "umount", "-l", str(state))
        if relay is not None:
            stack.callback(relay.kill)
            relay.start()
    except (subprocess.CalledProcessError, EOFError, OSError) as error:
        raise _Lacking(getattr(error, "stderr", "") or str(error)) from None
    return ground
