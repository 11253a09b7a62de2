"""A public segment and two homes behind routers, in network namespaces.

Theory of operation
-------------------
    one -- 10.0.1.0/24 -- router of one -- 203.0.113.0/24 -- router of two -- 10.0.2.0/24 -- two
                                                 |
                                               relay, with two addresses

The routers are nftables. Linux gives a connection the port it has inside unless another connection
already has that port and the same remote endpoint, and lets in what belongs to one: where ports
are kept that is endpoint-independent mapping with address and port-dependent filtering. A probe
that comes before the first one out must not become a connection of the router itself: it would take
the port that the answer needs, and the punch fails. So the routers drop what is new from outside,
all but `OPEN`, which shows what happens without.

A namespace carries the id of the process that made it in its name: what a crash left behind is
swept away by the next that makes some. Who is not root has these rights in a namespace for users:

    unshare -Urnm sh -c 'mount -t tmpfs tmpfs /run && pytest tests/processes/test_namespaces.py'
"""

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

PREFIX = "mesh-test"
FOLDER = Path("/run/netns")
CLONE_NEWNET = 0x40000000  # sched.h
RELAY, RELAY_BESIDE = "203.0.113.1", "203.0.113.2"  # RFC 5737


class Router(StrEnum):
    """The kind of NAT of a home, and its nftables rules."""

    CONE = "cone"
    """Preserves ports: port-restricted."""
    SYMMETRIC = "symmetric"
    """Assigns a port per remote endpoint."""
    FULL = "full"
    """Forwards unsolicited datagrams to the host of the home."""
    OPEN = "open"
    """As `CONE`, and takes what comes early for itself: see above."""


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace, and the address of the machine in it that others reach first."""

    name: str
    host: str

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command in it, as the same process."""
        return ["ip", "netns", "exec", self.name, *words]

    def python(self, *words: str) -> list[str]:
        """Return the command line that runs this Python in it."""
        return self.command(sys.executable, *words)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in it, with this thread; a socket that is opened stays there."""
        with Path("/proc/thread-self/ns/net").open() as back, (FOLDER / self.name).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(back.fileno())


@dataclass(frozen=True, slots=True)
class Street:
    """All of it."""

    relay: Space
    one: Space
    two: Space
    router_of_one: Space
    router_of_two: Space


@contextmanager
def open_street(one: Router, two: Router) -> Iterator[Street]:
    """Build two homes with such routers; processes in them are ended when they are torn down."""
    street = Street(
        *_spaces(
            relay=RELAY,
            one="10.0.1.2",
            two="10.0.2.2",
            router_of_one="203.0.113.10",
            router_of_two="203.0.113.20",
        )
    )
    homes = [(street.one, street.router_of_one, one), (street.two, street.router_of_two, two)]
    with open_spaces(street.relay, *(space for home in homes for space in home[:2])):
        _ip(street.relay, "link add public type bridge", "link set public up")
        for host in (RELAY, RELAY_BESIDE):
            _ip(street.relay, f"address add {host}/24 dev public")
        for home, router, kind in homes:
            _connect(street.relay, home, router, kind, "lan")
            plug(home, "lan")
        yield street


@contextmanager
def open_cafe(street: Street, kind: Router) -> Iterator[Space]:
    """Build another router, to which home one moves by `plug`; yield the home as it is there."""
    (router,) = _spaces(router_of_cafe="203.0.113.30")
    guest = replace(street.one, host="10.0.3.2")
    with open_spaces(router):
        _connect(street.relay, guest, router, kind, "cafe")
        yield guest


def plug(home: Space, cable: str, instead_of: str | None = None) -> None:
    """Let a home reach others by a cable, and no longer by another one."""
    unplugged = [f"link set {instead_of} down"] if instead_of else []
    _ip(home, *unplugged, f"link set {cable} up", f"route add default via {_gateway(home)}")


@contextmanager
def open_spaces(*spaces: Space) -> Iterator[None]:
    """Make namespaces with nothing in them but loopback."""
    sweep()
    try:
        for space in spaces:
            run("ip", "netns", "add", space.name)
            _ip(space, "link set lo up")
        yield
    finally:
        for space in spaces:
            _remove(space.name)


def new_spaces(count: int) -> list[Space]:
    """Name namespaces for `open_spaces`, with addresses to give them."""
    return _spaces(**{f"host_{number}": f"10.9.0.{number}" for number in range(1, count + 1)})


@cache
def can_make_namespaces() -> str:
    """Return why this machine does not support them; empty if it does."""
    if sys.platform != "linux":
        return "network namespaces are of Linux"
    if os.geteuid():
        return "network namespaces need root, if only that of `unshare -Urnm`"
    for tool in ("ip", "nft", "sysctl"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed"
    (trial,) = _spaces(trial="")
    try:
        with open_spaces(trial):
            run(*trial.command("nft", "-f", "-"), stdin="\n".join(_rules(Router.FULL, "10.0.0.2")))
    except subprocess.CalledProcessError as error:
        return f"no namespace with NAT: {error.stderr.strip()}"
    return ""


def sweep() -> None:
    """Remove leftovers of processes that have ended."""
    for path in FOLDER.glob(f"{PREFIX}-*-*"):
        maker = path.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if not Path("/proc", maker).exists():
            with suppress(subprocess.CalledProcessError):  # another process sweeps too
                _remove(path.name)


def run(*words: str, stdin: str = "") -> str:
    """Run a command to its end; return what it says, raise `CalledProcessError` with the rest."""
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=True)
    return done.stdout


def _spaces(**hosts: str) -> list[Space]:
    own = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"  # a process may have several of a kind
    return [Space(f"{own}-{name}", host) for name, host in hosts.items()]


def _ip(space: Space, *lines: str) -> None:
    run("ip", "-n", space.name, "-batch", "-", stdin="\n".join(lines))


def _connect(public: Space, home: Space, router: Space, kind: Router, cable: str) -> None:
    gateway = _gateway(home)
    port = f"home{gateway.split('.')[2]}"
    _ip(
        router,
        f"link add wan type veth peer name {port} netns {public.name}",
        f"link add lan type veth peer name {cable} netns {home.name}",
        f"address add {router.host}/24 dev wan",
        f"address add {gateway}/24 dev lan",
        "link set wan up",
        "link set lan up",
    )
    _ip(public, f"link set {port} master public up")
    _ip(home, f"address add {home.host}/24 dev {cable}")
    run(*router.command("sysctl", "-qw", "net.ipv4.ip_forward=1"))
    run(*router.command("nft", "-f", "-"), stdin="\n".join(_rules(kind, home.host)))


def _gateway(home: Space) -> str:
    return home.host.removesuffix("2") + "1"


def _rules(kind: Router, inside: str) -> Sequence[str]:
    """Return the lines for `nft`; its 1.0 parses no block on one line, and no chain named `fwd`."""
    draws = " fully-random" if kind is Router.SYMMETRIC else ""
    rules = [
        "add table ip nat",
        "add chain ip nat leaving { type nat hook postrouting priority 100 ; }",
        f"add rule ip nat leaving oifname wan masquerade{draws}",
        "add table ip filter",
        "add chain ip filter passing { type filter hook forward priority 0 ; policy drop ; }",
        "add rule ip filter passing iifname lan accept",
        "add rule ip filter passing ct state established,related accept",
    ]
    if kind is Router.FULL:
        rules += [
            "add chain ip nat coming { type nat hook prerouting priority -100 ; }",
            f"add rule ip nat coming iifname wan udp dport 1024-65535 dnat to {inside}",
            "add rule ip filter passing ct status dnat accept",
        ]
    if kind is not Router.OPEN:
        rules += [
            "add chain ip filter own { type filter hook input priority 0 ; }",
            "add rule ip filter own iifname wan ct state new drop",
        ]
    return rules


def _remove(name: str) -> None:
    if not (FOLDER / name).exists():
        return
    for process in run("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    run("ip", "netns", "delete", name)


def _enter(file: int) -> None:
    kernel = ctypes.CDLL(None, use_errno=True)  # `os.setns` came with Python 3.12
    if kernel.setns(file, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no way into the namespace")
