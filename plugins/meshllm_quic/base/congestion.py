"""Congestion control for lossy paths, modelled on BBR.

Theory of operation. On radio links packet loss is a poor congestion signal, so this controller
follows BBR (draft-ietf-ccwg-bbr): it estimates delivery rate and round trip time, and keeps one
bandwidth-delay product in flight, plus a margin. It is simpler than BBR, because the congestion
window is its only control: aioquic paces at window / smoothed round trip. A window 25 % too large
sends 25 % above the rate, until the queue that this builds lengthens the round trip as much.

Time is counted in rounds: a round ends when a packet sent after its start is acknowledged.

- STARTUP doubles the window each round, until three rounds in a row raise the rate by under 25 %.
- DRAIN halves the bytes in flight for one round, in which the minimum round trip is measured.
- CRUISE keeps the rate for six to ten rounds; a fixed number would let all flows probe at once.
- PROBE sends 25 % more for two rounds, again while the rate grows, then enters DRAIN.

The round trip is the minimum of this cycle and the last. A minimum over a longer time would leave
no share next to flows that fill the queue; the deep DRAIN keeps it accurate if all flows use this
controller.

A part of the margin is the same for each flow: it helps slower flows more, until the flows that
share a queue are equal (FAST TCP, Wei et al. 2006, section IV).

An application-limited round may raise the rate estimate and never lowers it; the next burst may
exceed the rate. A loss of 10 % counts as congestion, whatever the rate, and discards earlier rates.
"""

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer

NAME = "meshllm"
START_PACKETS = 64
"""Initial window; aioquic sends a quarter of it as a burst: a row of 16 KiB."""
START_BYTES = 128 * 1024  # limit of the initial window for large datagrams
MIN_PACKETS = 4  # MinPipeCwnd of the draft
QUEUE_PACKETS = 6  # queued per flow; 3 ms at 20 Mbit/s
LATE_S = 0.003  # 1 ms of delayed acknowledgement, 1 ms of timer slack at each end
RATE_ROUNDS = 10  # window of the maximum filter for the rate: about one cycle
CRUISE_ROUNDS = 6  # fewer: DRAIN costs more of an idle link; more: flows converge more slowly
ROUND_TRIP_S = 10.0  # MinRTTFilterLen; for application-limited senders, which have no cycles
GROWTH = 1.25
STALLS = 3  # rounds without growth; one may be chance
TOO_MUCH_LOSS = 0.1
LOSS_PACKETS = 50  # at 3 % loss, fewer packets often show 10 % by chance
BACK_OFF = 0.85


class Phase(Enum):
    """State of the controller."""

    STARTUP = auto()
    DRAIN = auto()
    CRUISE = auto()
    PROBE = auto()


_GAIN = {Phase.STARTUP: 2.0, Phase.DRAIN: 0.5, Phase.CRUISE: 1.0, Phase.PROBE: 1.25}


class _SendState(NamedTuple):
    """Per-packet state at send time (draft-cheng-iccrg-delivery-rate-estimation section 3)."""

    delivered: int
    delivered_at: float
    first_sent_at: float


class Controller(QuicCongestionControl):
    """Keeps one bandwidth-delay product in flight."""

    def __init__(self, *, max_datagram_size: int) -> None:
        self.max_datagram_size = max_datagram_size
        self._delivered = 0
        self._delivered_at = self._first_sent_at = 0.0
        self.reset()

    @property
    def bytes_per_s(self) -> float | None:
        """Delivery rate of the path; None until the sender has once saturated it."""
        return max(self._rates) if self._was_full else None

    @property
    def round_trip_s(self) -> float | None:
        """Minimum round trip of this and the last cycle; None before the first sample."""
        shortest = min(self._trips)
        return shortest if math.isfinite(shortest) else None

    def reset(self) -> None:
        """Reset all estimates for a new path; packets of the old one give no samples."""
        self._known: dict[int, _SendState] = {}
        self._rates = deque([0.0], maxlen=RATE_ROUNDS)  # maximum of each round, in bytes/s
        self._trips = (math.inf, math.inf)  # minima of this cycle and of the last
        self._trips_at = -math.inf
        self._is_of_path = False  # whether the last acknowledged packet used the current path
        self._was_full = False  # in some round, so the path, not the sender, limits the rate
        self._phase, self._rounds = Phase.STARTUP, 0  # and the rounds left in it
        self._full, self._stalls = 0.0, 0
        self._goal = self._delivered
        self._trough = math.inf  # minimum of bytes in flight in this round
        self._acked = self._lost = 0
        self._begin(START_PACKETS)

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        """Record the delivery state at send time."""
        sent_at = packet.sent_time or 0.0
        if not self.bytes_in_flight:
            self._first_sent_at = self._delivered_at = sent_at
        known = _SendState(self._delivered, self._delivered_at, self._first_sent_at)
        self._known[packet.packet_number] = known
        self.bytes_in_flight += packet.sent_bytes

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        """Take a delivery rate sample."""
        if now > self._delivered_at:
            self._trough = min(self._trough, self.bytes_in_flight)
        self.bytes_in_flight -= packet.sent_bytes
        self._delivered += packet.sent_bytes
        self._delivered_at = now
        known = self._known.pop(packet.packet_number, None)
        self._is_of_path = known is not None
        if known is None:
            return
        self._acked += packet.sent_bytes
        sent_at = packet.sent_time or 0.0
        self._first_sent_at = sent_at
        elapsed = max(sent_at - known.first_sent_at, now - known.delivered_at)
        if elapsed > 0:
            self._rates[-1] = max(self._rates[-1], (self._delivered - known.delivered) / elapsed)
        if known.delivered >= self._goal:
            self._end_round()

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """Take a round trip sample and set the window; aioquic updates the pacing right after."""
        if not self._is_of_path:
            return
        if now > self._trips_at + ROUND_TRIP_S:
            self._trips, self._trips_at = (math.inf, self._trips[0]), now
        self._trips = (min(rtt, self._trips[0]), self._trips[1])
        self._resize()

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        """Count lost bytes; a small share is not a congestion signal."""
        lost = list(packets)
        self._lost += sum(each.sent_bytes for each in lost if each.packet_number in self._known)
        self.on_packets_expired(packets=lost)

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        """Remove packets from the bytes in flight."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._known.pop(packet.packet_number, None)

    def on_persistent_congestion(self) -> None:
        """Restart with the minimum window (RFC 9002 section 7.6)."""
        self.reset()
        self._begin(MIN_PACKETS)

    def _begin(self, packets: int) -> None:
        self._floor = self.congestion_window = self._at_most(packets)

    def _at_most(self, packets: int) -> int:
        size = max(START_BYTES, 2 * self.max_datagram_size)
        return min(packets * self.max_datagram_size, size)

    def _end_round(self) -> None:
        """Evaluate the round, and choose the phase of the next one."""
        self._goal = self._delivered
        is_limited = self._trough < self.congestion_window / 2
        self._trough = math.inf
        is_congested = self._is_congested()
        if is_limited:
            self._floor = self._at_most(START_PACKETS)
            return
        self._was_full = True
        if is_congested:
            self._rates.extend(RATE_ROUNDS * [BACK_OFF * self._rates[-1]])  # replaces all rates
        self._advance(is_congested=is_congested)
        if self._phase is not Phase.STARTUP:
            self._floor = self._at_most(MIN_PACKETS)
        self._rates.append(0.0)

    def _is_congested(self) -> bool:
        """Return whether the loss rate since the last evaluation is too high."""
        total = self._acked + self._lost
        if total < LOSS_PACKETS * self.max_datagram_size:
            return False
        is_congested = self._lost > TOO_MUCH_LOSS * total
        self._acked = self._lost = 0
        return is_congested

    def _advance(self, *, is_congested: bool) -> None:
        """Enter the next phase if this one is complete."""
        self._rounds -= 1
        rate = max(self._rates)
        has_grown = rate >= GROWTH * self._full
        match self._phase:
            case Phase.STARTUP if has_grown and not is_congested:
                self._full, self._stalls = rate, 0
            case Phase.STARTUP:
                self._stalls += 1
                if is_congested or self._stalls == STALLS:
                    self._enter(Phase.DRAIN, 1)
            case Phase.DRAIN if self._rounds <= 0:
                self._trips_at = -math.inf  # the cycle ends here
                self._enter(
                    Phase.CRUISE, CRUISE_ROUNDS + self._delivered // self.max_datagram_size % 5
                )
            case Phase.CRUISE if self._rounds <= 0:
                self._full = rate
                self._enter(Phase.PROBE, 2)
            case Phase.PROBE if is_congested:
                self._enter(Phase.DRAIN, 1)
            case Phase.PROBE if self._rounds <= 0:
                is_worth_more = rate > (1 + GROWTH) / 2 * self._full  # half of the probed growth
                self._full = rate
                self._enter(*(Phase.PROBE, 2) if is_worth_more else (Phase.DRAIN, 1))

    def _enter(self, phase: Phase, rounds: int) -> None:
        self._phase, self._rounds = phase, rounds

    def _resize(self) -> None:
        """Set the window to the bandwidth-delay product plus the margin."""
        rate = max(self._rates)
        window = _GAIN[self._phase] * rate * min(self._trips)
        if self._phase is not Phase.DRAIN:
            window += rate * LATE_S + QUEUE_PACKETS * self.max_datagram_size
        self.congestion_window = max(self._floor, int(window))


register_congestion_control(NAME, Controller)


def reset_path(quic: QuicConnection, max_datagram_size: int) -> None:
    """Reset round trip, pacing and window of a connection for a new path (RFC 9000 section 9.4).

    aioquic supports neither client migration nor a change of the datagram size, so this sets its
    private attributes.
    """
    quic._max_datagram_size = max_datagram_size
    recovery = quic._loss
    recovery._pacer = QuicPacketPacer(max_datagram_size=max_datagram_size)
    recovery._rtt_initialized = False
    recovery._rtt_latest = recovery._rtt_smoothed = recovery._rtt_variance = 0.0
    recovery._rtt_min = math.inf
    recovery._pto_count = 0
    controller = recovery._cc
    if isinstance(controller, Controller):
        controller.max_datagram_size = max_datagram_size
        controller.reset()
