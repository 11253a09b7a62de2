"""Addresses of peers that lead to this machine, or carry more than a host and a port."""

import asyncio
import errno
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshllm.names import MeshId, NodeId
from meshllm.node.net import peer_address
from meshllm.node.net.peer_address import (
    MAX_RESOLVED,
    DialTarget,
    LocalAddressPolicy,
    SameHostDetector,
    is_literal,
    machine_secret,
    own_hosts,
    permitted,
    target,
)
from tests.builders.waiting import until

THREADS = ThreadPoolExecutor(1)
ONE, OTHER = NodeId(b"1" * 32), NodeId(b"2" * 32)
MESH = MeshId(b"m" * 16)
OWN = frozenset({"127.0.0.1", "10.0.0.7", "fd00::7"})
ELSEWHERE = ("ws://10.0.0.8:7700", "quic://[fd00::8]:7700", "wss://mesh.example", "loopback:a-1_b")
HERE = (
    "ws://127.0.0.1:80", "ws://[::1]:80", "ws://127.9.9.9:80", "ws://[::ffff:127.0.0.1]:80",
    "ws://10.0.0.7:80", "quic://[fd00::7]:80", "ws://0.0.0.0:80", "ws://224.0.0.1:80",
    "http://169.254.169.254:80", "ws://[fe80::1]:80", "ws://[fe80::1%1]:80",
)  # fmt: skip
NEVER = (
    "ws://10.0.0.8:80/admin", "ws://10.0.0.8:80/?a=b", "ws://10.0.0.8:80?a=b", "ws://a:b@c:80",
    "ws://10.0.0.8:80#a", "ws://10.0.0.8:80/ HTTP", "ws://10.0.0.8:99999", "ws://[::1", "ws://",
    "ws://h\xe9:80", "ws://h:80\\x", "unix:/run/docker.sock", "unix:../a", "ws://10.0.0.8:0",
    "ws://[fd00::7%1]:80", "ws://[::ffff:10.0.0.7%1]:80", "ws://[::1%lo]:80",
)  # fmt: skip


async def resolve(address: str, local: LocalAddressPolicy) -> list[str]:
    return [place.address for place in await places(address, local)]


async def places(address: str, local: LocalAddressPolicy) -> list[DialTarget]:
    return await peer_address.resolve(address, local, THREADS)


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_address, "own_hosts", lambda: OWN)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name server."""
    known: dict[str, list[str]] = {}

    def lookup(host: str, port: int, **_: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(8, "unknown")
        return [(0, 0, 0, "", (each, port)) for each in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return known


def test_a_host_and_a_port_elsewhere_are_permitted() -> None:
    assert permitted(ELSEWHERE, LocalAddressPolicy.NO) == ELSEWHERE


@pytest.mark.parametrize("address", HERE)
def test_this_machine_is_for_peers_on_it(address: str) -> None:
    assert permitted([address], LocalAddressPolicy.NO) == ()
    assert (
        permitted([address], LocalAddressPolicy.YES)
        == permitted([address], LocalAddressPolicy.LITERAL)
        == (address,)
    )


@pytest.mark.parametrize("address", NEVER)
def test_more_than_a_host_and_a_port_is_for_nobody(address: str) -> None:
    assert permitted([address], LocalAddressPolicy.YES) == ()


def test_a_link_local_network_is_used_by_machines_that_are_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_address, "own_hosts", lambda: OWN | {"169.254.3.4"})

    assert permitted(["ws://169.254.9.9:7700"], LocalAddressPolicy.NO)
    assert not permitted(["ws://127.0.0.1:7700"], LocalAddressPolicy.NO)


async def test_a_name_becomes_its_numbers(names: dict[str, list[str]]) -> None:
    names["desk"] = [*(f"10.1.0.{number}" for number in range(9)), "fd00::9"]

    found = await resolve("quic://key@desk:80", LocalAddressPolicy.NO)

    assert found == [f"quic://key@10.1.0.{number}:80" for number in range(MAX_RESOLVED)]


async def test_a_name_of_this_machine_is_not_dialled(names: dict[str, list[str]]) -> None:
    names["evil"] = ["10.1.0.1", "127.0.0.1"]

    assert await resolve("ws://evil:80", LocalAddressPolicy.NO) == []
    assert await resolve("ws://evil:80", LocalAddressPolicy.LITERAL) == []
    for local in (LocalAddressPolicy.HERE, LocalAddressPolicy.YES):
        assert await resolve("ws://evil:80", local) == ["ws://evil:80"]


async def test_a_name_that_tls_proves_is_kept(names: dict[str, list[str]]) -> None:
    names["mesh"] = ["10.1.0.1", "fd00::9"]

    assert await places("wss://mesh", LocalAddressPolicy.NO) == [
        DialTarget("wss://mesh", ("10.1.0.1", "fd00::9"))
    ]
    by_transport = [DialTarget("wss://mesh")]
    assert await places("wss://mesh", LocalAddressPolicy.YES) == by_transport
    assert await resolve("ws://mesh", LocalAddressPolicy.NO) == ["ws://10.1.0.1", "ws://[fd00::9]"]


async def test_all_numbers_of_a_name_that_tls_proves_may_be_tried(
    names: dict[str, list[str]],
) -> None:
    names["mesh"] = [*(f"fd00::a{number}" for number in range(2 * MAX_RESOLVED)), "10.1.0.1"]

    [place] = await places("wss://mesh", LocalAddressPolicy.NO)

    assert place.hosts == tuple(names["mesh"])


async def test_every_number_of_a_name_is_checked(names: dict[str, list[str]]) -> None:
    names["evil"] = [*(f"10.1.0.{number}" for number in range(MAX_RESOLVED)), "127.0.0.1"]

    assert await places("wss://evil", LocalAddressPolicy.NO) == []


async def test_an_unknown_name_is_an_error(names: dict[str, list[str]]) -> None:
    with pytest.raises(OSError, match="unknown"):
        await resolve("ws://nowhere:80", LocalAddressPolicy.NO)


async def test_a_slow_name_server_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    def ask(*_: Any, **__: Any) -> list[object]:
        asked.set()
        answers.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(peer_address, "LOOK_UP_S", 3600.0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    slow = asyncio.create_task(resolve("ws://slow:80", LocalAddressPolicy.NO))
    await until(asked.is_set)
    await asyncio.to_thread(int)  # it has the thread of others
    is_done = slow.done()
    answers.set()

    assert not is_done
    assert await slow == []


async def test_a_look_up_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [answers.wait()])
    monkeypatch.setattr(peer_address, "LOOK_UP_S", 0.0)

    with pytest.raises(TimeoutError):
        await resolve("ws://slow:80", LocalAddressPolicy.NO)
    answers.set()


async def test_what_has_no_host_is_not_resolved() -> None:
    assert await resolve("loopback:a", LocalAddressPolicy.NO) == ["loopback:a"]
    assert await resolve("unix:/x", LocalAddressPolicy.YES) == []


def test_a_number_is_told_from_a_name() -> None:
    assert is_literal("ws://10.0.0.8:80")
    assert not is_literal("ws://10.0.0.8.example:80")
    assert not is_literal("ws://127.1:80")


def test_attempts_are_counted_by_host_and_port() -> None:
    assert target("ws://10.0.0.8:80") == target("quic://10.0.0.8:80")
    assert target("ws://10.0.0.8:80")[0] == target("ws://10.0.0.8:81")[0]
    assert target("ws://10.0.0.8:80") != target("ws://10.0.0.8:81")
    assert target("ws://10.0.0.8:80")[0] != target("ws://10.0.0.9:80")[0]
    assert target("ws://[2001:db8::1]:80")[0] == target("ws://[2001:db8::2]:80")[0]
    assert target("ws://[2001:db8::1]:80") != target("ws://[2001:db8::2]:80")
    assert target("wss://desk.example:80") == ("desk.example", "desk.example 80")
    assert target("loopback:a")[0] == "loopback:a"


def test_attempts_at_nodes_behind_one_relay_are_counted_apart_and_together() -> None:
    first, second = target("quic://one@10.0.0.8:80"), target("quic://two@10.0.0.8:80")

    assert first != second
    assert first[0] == second[0] == target("quic://10.0.0.8:80")[0]


@pytest.mark.parametrize(
    "spellings",
    [
        ("ws://desk:80", "ws://desk:080", "ws://DESK:80", "ws://desk:80/"),
        ("ws://[2001:db8::1]:80", "ws://[2001:DB8:0::1]:80", "ws://[2001:db8::0.0.0.1]:80"),
        ("ws://10.0.0.8:80", "ws://[::ffff:10.0.0.8]:80", "ws://[::ffff:a00:8]:0080"),
        ("ws://[fe80::1%1]:80", "ws://[fe80::1%eth0]:80", "ws://[fe80::1]:80"),
    ],
    ids=["name", "IPv6", "IPv4", "zone"],
)
def test_spellings_of_one_address_are_one_target(spellings: tuple[str, ...]) -> None:
    assert permitted(spellings, LocalAddressPolicy.YES) == spellings
    assert len({target(each) for each in spellings}) == 1


def test_a_tag_shows_which_nodes_are_on_this_machine() -> None:
    here, there = SameHostDetector(b"one boot", MESH), SameHostDetector(b"another", MESH)

    assert here.has(ONE, here.tag(ONE))
    assert not here.has(OTHER, here.tag(ONE))
    assert not here.has(ONE, there.tag(ONE))
    assert not here.has(ONE, b"")
    assert here.tag(ONE) != SameHostDetector(b"one boot", MeshId(b"n" * 16)).tag(ONE)


def test_the_secret_of_a_machine_lasts() -> None:
    assert machine_secret() == machine_secret() != b""


def test_hosts_that_cannot_be_listed_are_those_of_the_last_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: int) -> frozenset[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    before = own_hosts()
    monkeypatch.setattr(peer_address, "_hosts_at", fail)

    assert own_hosts() == before
    monkeypatch.setattr(peer_address, "_last", [])
    with pytest.raises(OSError, match="Too many open files"):
        own_hosts()
