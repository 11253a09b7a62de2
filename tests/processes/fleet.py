"""Nodes in separate processes: started, queried over their sockets, killed."""

import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from subprocess import PIPE
from typing import Any, Self

from meshllm.api.unix import SOCKET
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.credential import Role
from tests.processes.fork_server import ForkedProcess, ForkServer

WAIT_S = 120.0  # timeout for what takes seconds on an idle machine
POLL_S = 0.1
MESHLLM = ("-m", "meshllm")
NODE = ("node", "--threads", "1")
ALONE = ("--no-discovery",)

PORTS = range(20_000, 32_000)  # below those of connections, and of who leaves the choice of a port
_NUMBERS = itertools.count(256 * os.getpid())  # mostly other ports in each process of tests

Fields = dict[str, Any]
Done = subprocess.CompletedProcess[str]


class Waited(AssertionError):
    """A condition did not become true in time."""


def until(happened: Callable[[], bool], told: Callable[[], str] = str) -> float:
    """Wait for a condition; return the seconds that it took."""
    begin = time.monotonic()
    while not happened():
        if time.monotonic() > begin + WAIT_S:
            raise Waited(f"not within {WAIT_S} s\n{told()}")
        time.sleep(POLL_S)
    return time.monotonic() - begin


def environment() -> dict[str, str]:
    """Return the environment of a process: that of this one, without settings of meshllm.

    It may keep compiled modules, as installed packages do.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHLLM_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def free_address(host: str = "127.0.0.1") -> str:
    """Return an unused address, which a process may use later.

    Linux gives such a port to no connection, and to no listener that leaves the choice to it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        while True:
            port = PORTS[next(_NUMBERS) % len(PORTS)]
            try:
                probe.bind((host.strip("[]"), port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return f"{host}:{port}"


class _Door(HTTPConnection):
    """A connection to the socket of a node, without what a client library sets up for each."""

    def __init__(self, path: Path) -> None:
        super().__init__("node")
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(str(self._path))


@dataclass
class Node:
    """One `meshllm node`; its output is stored next to its state folder."""

    name: str
    folder: Path
    address: str
    server: ForkServer | None = None
    """Starts its process; None starts a new interpreter."""
    process: "subprocess.Popen[bytes] | ForkedProcess | None" = None

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def stdout(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "err").read_text()

    def start(
        self,
        *options: str,
        root: tuple[str, ...] = (),
        within: tuple[str, ...] = (),
        command: tuple[str, ...] = NODE,
        variables: Mapping[str, str] | None = None,
    ) -> Self:
        """Start the process, by a command such as `prlimit` if one is given to start it ``within``.

        What it says replaces what an earlier one said.
        """
        words = [
            *root, *command, "--state", str(self.state), "--name", self.name,
            "--listen", self.address, *options,
        ]  # fmt: skip
        given = {**environment(), **(variables or {})}
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            if self.server and not within and command is NODE:
                self.process = self.server.start(words, given, out, err)
            else:
                words = [*within, sys.executable, *MESHLLM, *words]
                self.process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=given
                )
        return self

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise Waited(f"{self.name} runs on\n{self.stderr}") from None

    def kill(self) -> None:
        """End the process as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def status(self) -> Fields:
        """Query the status; return an empty one while the node does not listen."""
        api_server = _Door(self.state / SOCKET)
        try:
            api_server.request("GET", "/mesh/status")
            found: Fields = json.load(api_server.getresponse())
        except (OSError, HTTPException):
            return {}
        finally:
            api_server.close()
        return found

    def states(self) -> dict[str, str]:
        """Return the states of the nodes that it knows, by name."""
        return {each["name"]: each["state"] for each in self.status().get("nodes", ())}

    def is_up(self) -> bool:
        """Return whether the node listens; raise `Waited` if its process has ended."""
        if not self.is_running:
            raise Waited(f"{self.name} has ended\n{self.stderr}")
        return bool(self.status())

    def sees(self, text: str) -> float:
        """Wait until it has written to stderr."""
        return until(lambda: text in self.stderr, lambda: self.stderr)


@dataclass
class Fleet:
    """Nodes of one test, in folders below one with a short name."""

    folder: Path
    server: ForkServer | None = None
    """Starts the nodes; None starts new interpreters."""
    nodes: dict[str, Node] = field(default_factory=dict)

    def node(self, name: str, address: str | None = None) -> Node:
        """Return the node of a name; a new one is not yet started."""
        if name not in self.nodes:
            (self.folder / name).mkdir()
            at = address or free_address()
            self.nodes[name] = Node(name, self.folder / name, at, self.server)
        return self.nodes[name]

    def create_mesh(self, name: str, *addresses: str) -> str:
        """Create the state of a founder, and return a ticket of its mesh."""
        node = self.node(name)
        store = StateStore.open(node.state)
        store.create_mesh()
        at = addresses or (f"ws://{node.address}",)
        return store.invite(at, Role.NODE, lasts_s=3600, uses=None).encode()

    def form(self) -> float:
        """Wait until all running nodes report one ring of all of them; return the seconds."""
        running = [each for each in self.nodes.values() if each.is_running]

        def is_formed() -> bool:
            if not all(each.is_running for each in running):
                raise Waited(f"a node has ended\n{self.told()}")
            rings = [status["ring"] for each in running if (status := each.status())]
            return (
                len(rings) == len(running)
                and all(ring["state"] == "serving" for ring in rings)
                and all(len(ring["stages"]) == len(running) for ring in rings)
                and len({(ring["epoch"], ring["digest"]) for ring in rings}) == 1
            )

        return until(is_formed, self.told)

    def told(self) -> str:
        """Return the stderr of every process."""
        said = ((each.name, each.folder / "err") for each in self.nodes.values())
        return "\n".join(f"--- {name}\n{err.read_text()}" for name, err in said if err.exists())

    def close(self) -> None:
        """End every process, and remove the folders."""
        for node in self.nodes.values():
            node.kill()
        shutil.rmtree(self.folder)


@contextmanager
def open_fleet(server: ForkServer | None = None) -> Iterator[Fleet]:
    """Create a folder for nodes with a short path, since socket paths are limited."""
    fleet = Fleet(Path(tempfile.mkdtemp(prefix="m", dir="/tmp")), server)
    try:
        yield fleet
    finally:
        fleet.close()


def meshllm(
    *words: str, state: Path | None = None, stdin: str = "", server: ForkServer | None = None
) -> Done:
    """Run another command, for a node or without one; a ``server`` starts its process faster."""
    place = ("--state", str(state)) if state else ()
    if server:
        return server.run([*words, *place], environment(), stdin, WAIT_S)
    return subprocess.run(
        [sys.executable, *MESHLLM, *words, *place],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env=environment(),
    )


def ask(node: Node, prompt: str) -> str:
    """Send a prompt through a node with `meshllm chat`, on its stdin."""
    done = meshllm("chat", state=node.state, stdin=f"{prompt}\n", server=node.server)
    if done.returncode:
        raise Waited(f"{done.stderr}\n{node.stderr}")
    return done.stdout


@dataclass
class Chat:
    """A request whose answer has begun."""

    process: "subprocess.Popen[bytes]"
    begun: bytes
    node: "Node"
    errors: str = ""
    """What it wrote to stderr, after its end."""

    @property
    def is_under_way(self) -> bool:
        return self.process.poll() is None

    def answer(self) -> str:
        """Wait for the end; return the whole answer."""
        rest, errors = self.process.communicate(timeout=WAIT_S)
        self.errors = errors.decode()
        if self.process.returncode:
            raise Waited(f"{self.errors}\n{self.node.stderr}")
        return (self.begun + rest).decode()


@contextmanager
def asking(node: Node, prompt: str, *options: str, state: Path | None = None) -> Iterator[Chat]:
    """Send a request through a node; return when the first character of the answer has arrived."""
    with chatting(state or node.state, prompt, *options) as (process, begun):
        yield Chat(process, begun, node)


@contextmanager
def chatting(
    state: Path, prompt: str, *options: str
) -> Iterator[tuple["subprocess.Popen[bytes]", bytes]]:
    """Run `meshllm chat`; return when the first character of the answer has arrived."""
    command = [sys.executable, *MESHLLM, "chat", "--state", str(state), *options, prompt]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, bufsize=0, env=environment()
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(1)
        if not begun:
            assert process.stderr is not None
            raise Waited(process.stderr.read().decode())
        yield process, begun
        process.kill()
