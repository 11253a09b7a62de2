"""The shaped network between namespaces has the configured delay, rate and loss."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.plugins.quic.shaper import Shaper, can_shape, shaped
from tests.processes.namespaces import Space, can_make_namespaces, new_spaces, open_spaces, run
from tests.simulation.wires import Line

WAIT_S = 60.0
SOON_S = 0.3


@pytest.fixture
def spaces() -> Iterator[list[Space]]:
    if reason := can_make_namespaces() or can_shape():
        pytest.skip(reason)
    named = new_spaces(3)
    with open_spaces(*named):
        yield named


@contextmanager
def sockets(spaces: Sequence[Space]) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        opened = []
        for space in spaces:
            with space.entered():
                one = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            one.bind((space.host, 7000))
            one.settimeout(WAIT_S)
            opened.append(one)
        yield opened


def test_a_round_trip_takes_twice_the_delay_between_all_pairs(spaces: list[Space]) -> None:
    with shaped(spaces, Line(delay_s=0.05)), sockets(spaces) as ends:
        for one, other in ((ends[0], ends[1]), (ends[1], ends[2]), (ends[2], ends[0])):
            began = time.monotonic()
            one.sendto(b"there", other.getsockname())
            data, source = other.recvfrom(2000)
            other.sendto(data + b" and back", source)

            assert one.recv(2000) == b"there and back"
            assert time.monotonic() - began >= 0.1


def test_rate_and_queue_limit_the_throughput(spaces: list[Space]) -> None:
    slow = Line(bytes_per_s=100_000, queue_bytes=10_000)
    with shaped(spaces, slow), sockets(spaces) as (one, other, _):
        began = time.monotonic()
        for number in range(30):
            one.sendto(bytes([number]).ljust(972), other.getsockname())
        heard = [other.recv(2000)[0] for _ in range(10)]
        took_s = time.monotonic() - began
        other.settimeout(SOON_S)
        with suppress(TimeoutError):
            while True:
                heard.append(other.recv(2000)[0])

    assert heard[:10] == list(range(10))
    assert took_s >= 0.1  # 10 packets of 1000 bytes
    assert len(heard) < 30


def test_a_datagram_longer_than_the_mtu_is_fragmented(spaces: list[Space]) -> None:
    with shaped(spaces, Line(mtu=1280)), sockets(spaces) as (one, other, _):
        mtu = run(*spaces[0].command("cat", "/sys/class/net/slow/mtu"))
        one.sendto(bytes(3000), other.getsockname())

        assert len(other.recv(4000)) == 3000
    assert mtu == "1280\n"


def test_a_shaper_that_cannot_start_is_an_error(spaces: list[Space]) -> None:
    nowhere = [Space("mesh-test-nowhere", "10.9.0.1")]

    with pytest.raises(OSError, match="has ended"), shaped(nowhere, Line()):
        pytest.fail("it began")


def packet(to: str, text: bytes = b"", first: int = 0x45, by: str = "0.0.0.0") -> bytes:
    return bytes([first]) + bytes(11) + socket.inet_aton(by) + socket.inet_aton(to) + text


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_packet_is_written_when_it_arrives_and_not_before(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    shaper = Shaper({socket.inet_aton("10.9.0.1"): writer}, Line(delay_s=0.5))

    shaper.take(99, packet("10.9.0.1", b"first"), now=1.0)
    shaper.take(99, packet("10.9.0.1", b"second"), now=1.0)
    shaper.deliver(now=1.4)
    with pytest.raises(BlockingIOError):
        os.read(reader, 100)
    assert shaper.next_at == 1.5
    shaper.deliver(now=1.5)

    sent = packet("10.9.0.1", b"first") + packet("10.9.0.1", b"second")
    assert os.read(reader, 100) == sent
    assert shaper.next_at is None


def test_packets_without_destination_or_not_ipv4_are_dropped(pipe: tuple[int, int]) -> None:
    shaper = Shaper({socket.inet_aton("10.9.0.1"): pipe[1]}, Line())

    for other in (packet("10.9.0.2"), packet("10.9.0.1", first=0x60), b""):
        shaper.take(99, other, now=1.0)

    assert shaper.next_at is None
    assert shaper.dropped == 0


def test_a_cut_drops_what_goes_one_way(pipe: tuple[int, int]) -> None:
    one, other = socket.inet_aton("10.9.0.1"), socket.inet_aton("10.9.0.2")
    shaper = Shaper({one: pipe[1], other: pipe[1]}, Line(delay_s=1.0))
    shaper.cuts = frozenset({(one, other)})

    shaper.take(99, packet("10.9.0.2", by="10.9.0.1"), now=1.0)
    assert (shaper.dropped, shaper.next_at) == (1, None)

    shaper.take(99, packet("10.9.0.1", by="10.9.0.2"), now=1.0)
    assert (shaper.dropped, shaper.next_at) == (1, 2.0)


def test_losses_are_counted_and_a_full_device_drops(pipe: tuple[int, int]) -> None:
    shaper = Shaper({socket.inet_aton("10.9.0.1"): pipe[1]}, Line(loss=1))
    shaper.take(99, packet("10.9.0.1"), now=1.0)
    assert (shaper.dropped, shaper.next_at) == (1, None)

    shaper.line = Line()
    for _ in range(100):  # a pipe holds 64 KiB
        shaper.take(99, packet("10.9.0.1", bytes(1000)), now=2.0)
    shaper.deliver(now=2.0)

    assert shaper.next_at is None
