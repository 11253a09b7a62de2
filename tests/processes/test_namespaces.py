"""Homes behind the routers of a real kernel, and what passes between them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.processes.capture import Capture, capturing, parse
from tests.processes.fleet import until
from tests.processes.namespaces import (
    FOLDER,
    PREFIX,
    RELAY,
    RELAY_BESIDE,
    Router,
    Space,
    Street,
    can_make_namespaces,
    new_spaces,
    open_cafe,
    open_spaces,
    open_street,
    plug,
    run,
    sweep,
)

PORT = 7000
SOON_S = 0.05  # for what is not to come
WAIT_S = 60.0
ROUNDS = 10

Address = tuple[str, int]


@pytest.fixture
def kernel() -> None:
    if reason := can_make_namespaces():
        pytest.skip(reason)


def udp(space: Space, host: str = "0.0.0.0", port: int = PORT) -> socket.socket:
    with space.entered():
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind((host, port))
    return opened


def hear(end: socket.socket, wait_s: float = WAIT_S) -> tuple[bytes, Address] | None:
    end.settimeout(wait_s)
    try:
        data, source = end.recvfrom(2048)
    except TimeoutError:
        return None
    return data, source


def observed(end: socket.socket, observer: socket.socket) -> Address:
    """Return as whom an observer sees an end."""
    end.sendto(b"ask", observer.getsockname())
    heard = hear(observer)
    assert heard is not None
    return heard[1]


def punch(one: socket.socket, two: socket.socket, observer: socket.socket) -> bool:
    """Let both send to where the observer saw the other, or something came from; tell if met."""
    ends = {one: observed(one, observer), two: observed(two, observer)}
    targets = {one: ends[two], two: ends[one]}
    met = set[socket.socket]()
    for _ in range(ROUNDS):
        for end, target in targets.items():
            end.sendto(b"probe", target)
        for end in ends:
            if heard := hear(end, SOON_S):
                targets[end] = heard[1]
                met.add(end)
        if len(met) == 2:
            return True
    return False


def refuse(*words: str, **_: str) -> str:
    raise subprocess.CalledProcessError(1, words, stderr="no rights\n")


@contextmanager
def street(one: Router, two: Router) -> Iterator[tuple[Street, list[socket.socket]]]:
    """Open a street, with a socket in each home and one at each address of the relay."""
    with open_street(one, two) as opened, ExitStack() as stack:
        places = [
            (opened.one, "0.0.0.0"),
            (opened.two, "0.0.0.0"),
            (opened.relay, RELAY),
            (opened.relay, RELAY_BESIDE),
        ]
        yield opened, [stack.enter_context(udp(space, host)) for space, host in places]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("routers", "expected"),
    [
        ((Router.CONE, Router.CONE), True),
        ((Router.FULL, Router.SYMMETRIC), True),
        ((Router.CONE, Router.SYMMETRIC), False),
        ((Router.SYMMETRIC, Router.SYMMETRIC), False),
    ],
)
def test_hole_punching_works_if_the_routers_allow_it(
    routers: tuple[Router, Router], expected: bool
) -> None:
    with street(*routers) as (opened, (one, two, observer, _)):
        with capturing(opened.router_of_one) as capture:
            met = punch(one, two, observer)
        hosts = opened.router_of_one.host, opened.router_of_two.host
        sources = {each.source[0] for each in capture.between(*hosts)}

    assert met == expected
    assert hosts[0] in sources
    assert len(capture.between(hosts[0], RELAY)) == 1


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("router", Router)
def test_only_a_symmetric_router_shows_two_observers_two_ports(router: Router) -> None:
    with street(router, Router.CONE) as (opened, (one, _, first, second)):
        seen = [observed(one, each) for each in (first, second)]

    assert {host for host, _ in seen} == {opened.router_of_one.host}
    assert (seen[0] == seen[1]) == (router is not Router.SYMMETRIC)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("router", Router)
def test_only_a_full_router_passes_unsolicited_datagrams(router: Router) -> None:
    with street(router, Router.CONE) as (opened, (one, _, relay, _)):
        relay.sendto(b"hello", (opened.router_of_one.host, PORT))
        heard = hear(one, WAIT_S if router is Router.FULL else SOON_S)

    assert heard == ((b"hello", (RELAY, PORT)) if router is Router.FULL else None)


@pytest.mark.usefixtures("kernel")
def test_a_router_that_takes_what_comes_early_gives_the_answer_another_port() -> None:
    with street(Router.OPEN, Router.CONE) as (opened, (one, _, relay, _)):
        relay.sendto(b"early", (opened.router_of_one.host, PORT))
        seen = observed(one, relay)

    assert seen[1] != PORT


@pytest.mark.usefixtures("kernel")
def test_a_home_that_moves_is_seen_behind_the_other_router() -> None:
    with (
        street(Router.CONE, Router.CONE) as (opened, (one, _, observer, _)),
        open_cafe(opened, Router.CONE) as cafe,
    ):
        plug(cafe, "cafe", instead_of="lan")
        there = observed(one, observer)
        plug(opened.one, "lan", instead_of="cafe")
        back = observed(one, observer)

    assert there == ("203.0.113.30", PORT)
    assert back == (opened.router_of_one.host, PORT)


@pytest.mark.usefixtures("kernel")
def test_commands_run_in_their_namespace_and_end_with_it() -> None:
    (space,) = new_spaces(1)
    with open_spaces(space):
        links = run(*space.command("ip", "-brief", "link"))
        sleeper = subprocess.Popen(space.python("-c", "import time; print('up'); time.sleep(60)"))
        until(lambda: str(sleeper.pid) in run("ip", "netns", "pids", space.name))

    assert [line.split()[0] for line in links.splitlines()] == ["lo"]
    assert sleeper.wait() == -9
    assert not (FOLDER / space.name).exists()


@pytest.mark.usefixtures("kernel")
def test_an_error_leaves_nothing_behind() -> None:
    def own() -> list[Path]:
        return list(FOLDER.glob(f"{PREFIX}-{os.getpid()}-*"))

    before = own()
    with pytest.raises(InterruptedError), open_street(Router.CONE, Router.FULL):  # noqa: PT012
        assert len(own()) == len(before) + 5
        raise InterruptedError

    assert own() == before


@pytest.mark.usefixtures("kernel")
def test_leftovers_of_a_crash_are_removed() -> None:
    crash = (
        "import os\nfrom tests.processes.namespaces import new_spaces, open_spaces\n"
        "with open_spaces(*new_spaces(2)): os._exit(7)"
    )
    process = subprocess.Popen([sys.executable, "-c", crash], cwd=Path(__file__).parents[2])
    assert process.wait() == 7
    assert len(list(FOLDER.glob(f"{PREFIX}-{process.pid}-*"))) == 2

    sweep()

    assert not list(FOLDER.glob(f"{PREFIX}-{process.pid}-*"))


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (("sys.platform", "darwin"), "Linux"),
        (("os.geteuid", lambda: 1000), "root"),
        (("shutil.which", lambda tool: None if tool == "nft" else tool), "`nft` is not installed"),
        (("tests.processes.namespaces.run", refuse), "no namespace with NAT: no rights"),
    ],
)
def test_missing_requirements_of_a_machine_are_reported(
    missing: tuple[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", str)
    monkeypatch.setattr(*missing)

    assert reason in can_make_namespaces.__wrapped__()


def test_a_capture_reads_udp_and_nothing_else() -> None:
    head = bytes.fromhex("4500002400000000401100000a000102cb007101")
    udp_head = bytes.fromhex("1b581b59000c0000")

    passed = parse(head + udp_head + b"\x40abc", now=1.5)
    empty = parse(head + bytes.fromhex("1b581b5900080000"), now=1.5)

    assert passed is not None
    assert (passed.source, passed.to) == (("10.0.1.2", 7000), ("203.0.113.1", 7001))
    assert (passed.time, passed.size, passed.first) == (1.5, 4, 0x40)
    assert empty is not None
    assert (empty.size, empty.first) == (0, -1)
    for other in (b"", head, b"\x60" + bytes(60), head[:9] + b"\x06" + head[10:] + udp_head):
        assert parse(other, now=0) is None
    assert parse(head[:7] + b"\x01" + head[8:] + udp_head, now=0) is None


def test_a_capture_finds_the_datagrams_of_two_hosts() -> None:
    head = bytes.fromhex("4500002400000000401100000a000102cb0071011b581b59000c000040414243")
    back = head[:12] + head[16:20] + head[12:16] + head[20:]
    found = [parse(packet, now) for now, packet in enumerate((head, back))]
    capture = Capture([each for each in found if each])

    assert len(capture.between("10.0.1.2", "203.0.113.1")) == 2
    assert capture.between("203.0.113.1", "10.0.1.2", since=0.5) == capture.passed[1:]
    assert capture.between("10.0.1.2", "10.0.2.2") == []
