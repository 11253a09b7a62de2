"""The congestion controller on slow, lossy, changing links, on a virtual clock."""

import math
from collections import defaultdict
from itertools import groupby
from operator import itemgetter
from statistics import quantiles

import pytest
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketRecovery
from aioquic.tls import Epoch

from meshllm_quic.base.congestion import (
    LATE_S,
    MIN_PACKETS,
    NAME,
    QUEUE_PACKETS,
    START_PACKETS,
    Controller,
    Phase,
    reset_path,
)
from tests.plugins.quic.pipe import End, Pipe, TrafficShape

KIB = 1024
MB = 1_000_000
MUCH = 30 * MB  # more than any of these links carries in time
SIZE = 1200


def shape(
    mbit: float, rtt_ms: float = 40.0, loss: float = 0.0, queue: int = 512 * KIB
) -> TrafficShape:
    return TrafficShape(mbit * MB / 8, rtt_ms / 2e3, loss, queue)


def controller(end: End) -> Controller:
    made = end.quic._loss._cc
    assert isinstance(made, Controller)
    return made


def packet(number: int, at: float) -> QuicSentPacket:
    kind = QuicPacketType.ONE_RTT
    return QuicSentPacket(Epoch.ONE_RTT, True, True, False, number, kind, at, SIZE)


class Windows:
    """Sends one whole window per round trip; its round trip is at least ``rtt_s``."""

    def __init__(self, bytes_per_s: float, rtt_s: float) -> None:
        self.bytes_per_s, self.rtt_s, self.now = bytes_per_s, rtt_s, 0.0
        self.made = Controller(max_datagram_size=SIZE)
        self._sent = 0

    def send(self, times: int, loss: float = 0.0) -> None:
        """Send windows that each lose a share of their packets."""
        for _ in range(times):
            numbers = range(self._sent, self._sent + self.made.congestion_window // SIZE)
            packets = [packet(number, self.now) for number in numbers]
            for each in packets:
                self.made.on_packet_sent(packet=each)
            lost = round(loss * len(packets))
            seconds = max(self.rtt_s, (len(packets) - lost) * SIZE / self.bytes_per_s)
            self.now, self._sent = self.now + seconds, numbers.stop
            self.made.on_packets_lost(now=self.now, packets=packets[:lost])
            for each in packets[lost:]:
                self.made.on_packet_acked(now=self.now, packet=each)
                self.made.on_rtt_measurement(now=self.now, rtt=seconds)


@pytest.mark.parametrize(
    ("link", "size", "share"),
    [
        (shape(100, loss=0.005), 5 * MB, 0.65),
        (shape(100, loss=0.03), 5 * MB, 0.6),
        (shape(100, loss=0.005, queue=64 * KIB), 5 * MB, 0.5),
        (shape(10), 1 * MB, 0.8),
        (shape(10, loss=0.03), 1 * MB, 0.75),
        (shape(10, queue=64 * KIB), 1 * MB, 0.8),
        (shape(100, rtt_ms=5, loss=0.005), 3 * MB, 0.8),
        (shape(1000, rtt_ms=0.4), 3 * MB, 0.6),  # delayed acknowledgements take much longer
    ],
)
def test_a_new_connection_uses_the_link(link: TrafficShape, size: int, share: float) -> None:
    pipe = Pipe(link)
    one, other = pipe.connect(NAME)

    seconds = pipe.transfer(one, other, size)

    assert size / seconds > share * link.bytes_per_s


def test_a_lossless_link_is_fully_used() -> None:
    pipe = Pipe(shape(100))
    one, other = pipe.connect(NAME)
    pipe.transfer(one, other, 5 * MB)

    seconds = pipe.transfer(one, other, 10 * MB)

    assert 10 * MB / seconds > 0.85 * pipe.forth.shape.bytes_per_s


def test_cubic_wastes_most_of_a_lossy_link() -> None:
    pipe = Pipe(shape(100, loss=0.005))
    one, other = pipe.connect("cubic")

    seconds = pipe.transfer(one, other, 2 * MB)

    assert 2 * MB / seconds < 0.2 * pipe.forth.shape.bytes_per_s


@pytest.mark.parametrize("mbit", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_the_queue_stays_short(mbit: float) -> None:
    pipe = Pipe(shape(mbit, queue=4 * MB))
    one, _ = pipe.connect(NAME)

    pipe.send(one, MUCH)
    pipe.run(1.5)
    begun = len(pipe.forth.waits)
    pipe.run(3.0)

    assert max(pipe.forth.waits) < 0.06  # STARTUP doubles the round trip of 40 ms
    assert quantiles(pipe.forth.waits[begun:], n=20)[-1] < 0.03


@pytest.mark.parametrize(
    ("link", "flows"),
    [
        (shape(10), 2),
        pytest.param(shape(10, loss=0.005, queue=64 * KIB), 2, marks=pytest.mark.slow),
        pytest.param(shape(20), 4, marks=pytest.mark.slow),
    ],
)
def test_flows_share_the_link_fairly(link: TrafficShape, flows: int) -> None:
    pipe = Pipe(link)
    ends = []
    for _ in range(flows):
        ends.append(pipe.connect(NAME))
        pipe.send(ends[-1][0], MUCH)
        pipe.run(pipe.now + 0.5)
    pipe.run(pipe.now + 3.0 * (flows - 1))

    before = [other.received for _, other in ends]
    pipe.run(pipe.now + 3.0)
    shares = [other.received - had for (_, other), had in zip(ends, before, strict=True)]

    assert max(shares) < 3 * min(shares)
    assert sum(shares) > 0.85 * 3.0 * link.bytes_per_s


@pytest.mark.parametrize(("before", "after"), [(12, 4), (4, 12)])
def test_a_rate_that_changes_is_followed(before: float, after: float) -> None:
    pipe = Pipe(shape(before, loss=0.002))
    one, other = pipe.connect(NAME)
    pipe.send(one, MUCH)
    pipe.run(2.0)

    pipe.forth.shape.bytes_per_s = after * MB / 8
    pipe.run(7.0)
    received, begun = other.received, len(pipe.forth.waits)
    pipe.run(9.0)

    assert other.received - received > 0.8 * 2.0 * pipe.forth.shape.bytes_per_s
    assert quantiles(pipe.forth.waits[begun:], n=20)[-1] < 0.06


@pytest.mark.parametrize("seconds", [0.5, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_link_is_used_again_after_an_outage(seconds: float) -> None:
    pipe = Pipe(shape(10))
    one, other = pipe.connect(NAME)
    pipe.send(one, MUCH)
    pipe.run(1.5)

    pipe.forth.shape.loss = 1.0
    pipe.run(1.5 + seconds)
    pipe.forth.shape.loss = 0.0
    pipe.run(2.0 + 3 * seconds)  # exponential backoff of aioquic
    received = other.received
    pipe.run(pipe.now + 2.0)

    assert other.received - received > 0.8 * 2.0 * pipe.forth.shape.bytes_per_s


def test_a_loss_of_a_third_is_congestion() -> None:
    pipe = Pipe(shape(20))
    one, _ = pipe.connect(NAME)
    pipe.send(one, MUCH)
    pipe.run(2.0)
    known = controller(one).bytes_per_s or 0.0

    pipe.forth.shape.loss = 0.33
    pipe.run(5.0)

    assert (controller(one).bytes_per_s or math.inf) < known / 2


@pytest.mark.parametrize(("loss", "share"), [(0.05, 1.0), (0.2, 0.8)])
def test_only_a_loss_of_more_than_a_tenth_discards_earlier_rates(loss: float, share: float) -> None:
    link = Windows(2 * MB, 0.05)
    link.send(12)

    link.bytes_per_s *= 1 - loss
    link.send(4, loss)

    assert link.made.bytes_per_s == pytest.approx(share * 2 * MB, rel=0.02)


def test_a_rate_that_doubles_on_a_long_path_is_found_within_two_cycles() -> None:
    link = Windows(12 * MB, 0.2)
    link.send(30)
    assert link.made.bytes_per_s == pytest.approx(12 * MB, rel=0.02)

    link.bytes_per_s *= 2
    link.send(18)

    assert link.made.bytes_per_s == pytest.approx(24 * MB, rel=0.02)


def test_the_window_uses_the_shortest_round_trip_of_this_cycle_and_the_last() -> None:
    link = Windows(12 * MB, 0.04)
    link.send(30)
    made, window = link.made, link.made.congestion_window

    made.on_rtt_measurement(now=link.now + 11.0, rtt=0.06)
    assert made.round_trip_s == 0.04
    assert made.congestion_window == window

    made.on_rtt_measurement(now=link.now + 22.0, rtt=0.06)
    assert made.round_trip_s == 0.06
    assert made.congestion_window > 1.3 * window


def test_without_cycles_a_round_trip_counts_for_ten_to_twenty_seconds() -> None:
    made, shortest = Controller(max_datagram_size=SIZE), []
    for number, (now, seconds) in enumerate([(1.0, 0.04), (12.0, 0.06), (23.0, 0.06)]):
        single = packet(number, now - seconds)
        made.on_packet_sent(packet=single)
        made.on_packet_acked(now=now, packet=single)
        made.on_rtt_measurement(now=now, rtt=seconds)
        shortest.append(made.round_trip_s)

    assert shortest == [0.04, 0.04, 0.06]


@pytest.mark.parametrize(("count", "is_full"), [(31, False), (32, True), (40, True)])
def test_a_sender_that_fills_less_than_half_of_the_window_is_application_limited(
    count: int, is_full: bool
) -> None:
    made = Controller(max_datagram_size=SIZE)
    packets = [packet(number, 1.0) for number in range(count)]
    assert START_PACKETS == 2 * 32

    for each in packets:
        made.on_packet_sent(packet=each)
    for each in packets:
        made.on_packet_acked(now=1.1, packet=each)

    assert made.bytes_per_s == (pytest.approx(count * SIZE / 0.1) if is_full else None)


@pytest.mark.parametrize(
    ("count", "lost", "share"), [(59, 6, 1.0), (59, 7, 0.85), (48, 15, 1.0), (49, 15, 0.85)]
)
def test_loss_is_congestion_above_a_tenth_of_fifty_packets_or_more(
    count: int, lost: int, share: float
) -> None:
    made = Controller(max_datagram_size=SIZE)
    packets = [packet(number, 1.0) for number in range(count)]
    following = [packet(number, 1.1) for number in range(count, count + 40)]

    for each in packets:
        made.on_packet_sent(packet=each)
    made.on_packets_lost(now=1.1, packets=packets[:lost])
    for each in packets[lost:]:
        made.on_packet_acked(now=1.1, packet=each)
    for each in following:
        made.on_packet_sent(packet=each)
    made.on_packet_acked(now=1.2, packet=following[0])  # ends the round of the others

    assert made.bytes_per_s == pytest.approx(share * (count - lost) * SIZE / 0.1)


def test_packets_that_were_sent_slowly_and_acknowledged_at_once_give_no_high_rate() -> None:
    made = Controller(max_datagram_size=SIZE)
    first, second, third = packet(1, 1.0), packet(2, 1.0), packet(3, 2.0)
    for each in (first, second):
        made.on_packet_sent(packet=each)
    made.on_packet_acked(now=2.0, packet=first)
    made.on_packet_sent(packet=third)

    made.on_packet_acked(now=2.01, packet=second)
    made.on_packet_acked(now=2.02, packet=third)

    assert max(made._rates) == pytest.approx(2 * SIZE / 1.0)


def test_cycles_of_cruise_probe_and_drain_follow_each_other() -> None:
    link = Windows(12 * MB, 0.04)
    rounds = []
    for _ in range(400):
        link.send(1)
        rounds.append((link.made._phase, link.made.congestion_window))
    runs = [(phase, [*found]) for phase, found in groupby(rounds, itemgetter(0))]
    cycles = runs[1:-1]  # the last one may be cut off
    lengths, windows = defaultdict[Phase, set[int]](set), defaultdict[Phase, set[int]](set)
    for each, run in cycles:
        lengths[each].add(len(run))
        windows[each] |= {window for _, window in run}

    assert runs[0][0] is Phase.STARTUP
    assert [each for each, _ in cycles[:4]] == [Phase.DRAIN, Phase.CRUISE, Phase.PROBE, Phase.DRAIN]
    assert (lengths[Phase.DRAIN], lengths[Phase.PROBE]) == ({1}, {2})
    assert lengths[Phase.CRUISE] <= set(range(6, 11))
    assert len(lengths[Phase.CRUISE]) > 1
    in_flight = 12 * MB * 0.04
    margin = 12 * MB * LATE_S + QUEUE_PACKETS * SIZE
    for each, expected in (
        (Phase.DRAIN, in_flight / 2),
        (Phase.CRUISE, in_flight + margin),
        (Phase.PROBE, 1.25 * in_flight + margin),
    ):
        assert windows[each]
        assert all(window == pytest.approx(expected, rel=0.005) for window in windows[each])


def test_a_slow_link_has_four_packets_in_flight_at_least() -> None:
    link, windows = Windows(20_000, 0.04), []
    for _ in range(150):
        link.send(1)
        windows.append(link.made.congestion_window)

    assert min(windows) == MIN_PACKETS * SIZE


@pytest.mark.parametrize("size", [8 * KIB, 16 * KIB, 64 * KIB])
def test_a_message_after_a_pause_is_sent_as_a_burst(size: int) -> None:
    pipe = Pipe(shape(20))
    one, other = pipe.connect(NAME)
    for _ in range(20):
        pipe.run(pipe.now + 0.03)
        seconds = pipe.transfer(one, other, size)

    on_the_wire = 1.04 * size / pipe.forth.shape.bytes_per_s
    assert seconds < 0.02 + on_the_wire + 0.001


def test_application_limited_rounds_do_not_lower_the_rate() -> None:
    pipe = Pipe(shape(20))
    one, other = pipe.connect(NAME)
    pipe.transfer(one, other, 3 * MB)
    known = controller(one).bytes_per_s or math.inf

    for _ in range(40):
        pipe.transfer(one, other, 8 * KIB)
        pipe.run(pipe.now + 0.1)

    assert (controller(one).bytes_per_s or 0.0) >= 0.95 * known
    assert pipe.transfer(one, other, 3 * MB) < 3 * MB / (0.85 * pipe.forth.shape.bytes_per_s)


def test_no_state_is_kept_for_acknowledged_packets() -> None:
    pipe = Pipe(shape(20, loss=0.02))
    one, other = pipe.connect(NAME)

    pipe.transfer(one, other, 1 * MB)
    pipe.run(pipe.now + 1.0)

    assert controller(one).bytes_in_flight == 0
    assert not controller(one)._known


def test_round_trip_and_rate_are_reported() -> None:
    pipe = Pipe(shape(20))
    one, other = pipe.connect(NAME)
    assert Controller(max_datagram_size=SIZE).bytes_per_s is None
    assert Controller(max_datagram_size=SIZE).round_trip_s is None

    pipe.transfer(one, other, 2 * MB)

    assert controller(one).bytes_per_s == pytest.approx(20 * MB / 8, rel=0.05)
    assert controller(one).round_trip_s == pytest.approx(0.04, rel=0.1)


def test_an_application_limited_connection_reports_no_rate() -> None:
    pipe = Pipe(shape(1000, rtt_ms=30))
    one, other = pipe.connect(NAME)

    for _ in range(20):
        pipe.transfer(one, other, 90)

    assert controller(one).bytes_per_s is None
    pipe.transfer(one, other, 20 * MB)
    assert (controller(one).bytes_per_s or 0.0) > 10 * MB


def test_a_connection_moves_to_another_path_in_the_middle() -> None:
    pipe = Pipe(shape(5, rtt_ms=100))
    one, other = pipe.connect(NAME)
    pipe.send(one, MUCH)
    pipe.run(2.0)

    pipe.forth.shape, pipe.back.shape = shape(50, rtt_ms=10), shape(50, rtt_ms=10)
    pipe.forth.free_at = pipe.now  # the queue of the old path delays nothing
    reset_path(one.quic, 1452)
    reset_path(other.quic, 1452)
    pipe.push(one)
    pipe.run(pipe.now + 0.5)
    received = other.received
    pipe.run(pipe.now + 1.0)

    assert other.received - received > 0.8 * pipe.forth.shape.bytes_per_s
    assert (controller(one).round_trip_s or math.inf) < 0.02


def test_a_connection_moves_to_a_worse_path_in_the_middle() -> None:
    pipe = Pipe(shape(30, rtt_ms=10))
    one, other = pipe.connect(NAME)
    pipe.send(one, MUCH)
    pipe.run(1.0)

    pipe.forth.shape, pipe.back.shape = shape(5, rtt_ms=100), shape(5, rtt_ms=100)
    reset_path(one.quic, SIZE)
    reset_path(other.quic, SIZE)
    pipe.push(one)
    pipe.run(pipe.now + 3.0)
    received = other.received
    pipe.run(pipe.now + 2.0)

    assert other.received - received > 0.8 * 2.0 * pipe.forth.shape.bytes_per_s
    assert (controller(one).round_trip_s or 0.0) > 0.09


def test_a_moved_connection_sends_datagrams_of_the_new_size() -> None:
    pipe = Pipe(shape(100))
    one, _ = pipe.connect(NAME)
    reset_path(one.quic, 9000)

    one.quic.send_stream_data(0, bytes(20_000))
    datagrams = [data for data, _ in one.quic.datagrams_to_send(now=pipe.now)]

    assert max(map(len, datagrams)) == 9000


def test_aioquic_has_the_private_attributes_that_a_path_reset_sets() -> None:
    pipe = Pipe(shape(100))
    one, _ = pipe.connect(NAME)
    recovery = one.quic._loss
    names = "initialized", "latest", "smoothed", "variance", "min"
    fresh = QuicPacketRecovery(
        congestion_control_algorithm=NAME,
        initial_rtt=0.1,
        max_datagram_size=1452,
        peer_completed_address_validation=True,
        send_probe=lambda: None,
    )
    assert recovery._rtt_initialized
    assert one.quic._max_datagram_size == recovery._pacer._max_datagram_size == SIZE

    reset_path(one.quic, 1452)

    for name in names:
        assert getattr(recovery, f"_rtt_{name}") == getattr(fresh, f"_rtt_{name}")
    assert recovery._pto_count == fresh._pto_count
    assert recovery._pacer.packet_time is None
    assert recovery.congestion_window == START_PACKETS * 1452


def test_a_path_reset_ignores_other_controllers() -> None:
    pipe = Pipe(shape(100))
    one, other = pipe.connect("cubic")

    reset_path(one.quic, 1452)

    assert pipe.transfer(one, other, 100_000) < 1.0


def test_packets_of_the_old_path_give_no_samples() -> None:
    made = Controller(max_datagram_size=SIZE)
    old, new = packet(1, 0.0), packet(2, 1.0)
    made.on_packet_sent(packet=old)
    made.reset()
    made.on_packet_sent(packet=new)
    assert made.bytes_in_flight == 2 * SIZE

    made.on_packet_acked(now=1.01, packet=old)
    made.on_rtt_measurement(now=1.01, rtt=1.01)
    assert (made.bytes_per_s, made.round_trip_s) == (None, None)

    made.on_packet_acked(now=1.1, packet=new)
    made.on_rtt_measurement(now=1.1, rtt=0.1)
    assert max(made._rates) == pytest.approx(SIZE / 0.1, rel=1)
    assert made.round_trip_s == 0.1
    assert made.bytes_in_flight == 0


def test_losses_of_the_old_path_are_no_congestion_of_the_new() -> None:
    link = Windows(12 * MB, 0.04)
    old = [packet(number, 0.0) for number in range(-400, 0)]
    for each in old:
        link.made.on_packet_sent(packet=each)
    link.made.reset()

    link.send(1)
    link.made.on_packets_lost(now=link.now, packets=old)
    link.send(2)

    assert link.made._phase is Phase.STARTUP
    assert link.made.bytes_in_flight == 0


def test_persistent_congestion_restarts_with_the_minimum_window() -> None:
    made = Controller(max_datagram_size=SIZE)
    lost = packet(1, 0.0)
    made.on_packet_sent(packet=lost)

    made.on_packets_lost(now=9.0, packets=[lost])
    made.on_persistent_congestion()

    assert made.congestion_window == MIN_PACKETS * SIZE
    assert made.bytes_in_flight == 0


@pytest.mark.parametrize(
    ("size", "window"), [(1200, 76_800), (16_000, 131_072), (100_000, 200_000)]
)
def test_the_initial_window_is_limited_in_bytes(size: int, window: int) -> None:
    assert Controller(max_datagram_size=size).congestion_window == window
