"""How much may be under way: a congestion controller for paths that lose.

Theory of operation. A loss says little where radio loses at random, so this follows BBR
(draft-ietf-ccwg-bbr): it measures what the path delivers and how long it takes, and keeps under way
what fits between, rate x round trip, and a little more. It is smaller than BBR, as the window is
its only handle: aioquic paces at window / smoothed round trip. A window a quarter too large offers
a quarter more than the rate, until the queue that this makes lengthens the round trip as much.

Time is counted in rounds: one is over when something sent after its beginning is acknowledged.

- STARTUP doubles each round, until the rate has not grown by a quarter in three of them.
- DRAIN sends less until half is under way, for one; the shortest round trip is seen then.
- CRUISE keeps the rate for six to ten; with the same number, flows would probe all at once.
- PROBE offers a quarter more for two, and again while the rate grows; then DRAIN.

The round trip is the shortest of this cycle and the last. Were it that of a longer time, others
that fill the queue would leave nothing; the deep DRAIN keeps it honest where all are such as this.

Of the little more, a part is the same for each flow: who has less gains more by it, until those
that share a queue are equal (FAST TCP, Wei et al. 2006, section IV).

A round in which the sender had too little to say may raise the rate and never lowers it; the burst
that comes next may be longer than what the rate allows. A tenth lost is congestion, whatever the
rate says, and what went before is forgotten.
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
"""Under way while the rate is not known; aioquic lets a quarter go at once: a row of 16 KiB."""
START_BYTES = 128 * 1024  # the same where datagrams are long
LEAST_PACKETS = 4  # MinPipeCwnd of the draft
MORE_PACKETS = 6  # in the queue for each flow; 3 ms at 20 Mbit/s
LATE_S = 0.003  # 1 ms of delayed acknowledgement, 1 ms of each end's timers
RATE_ROUNDS = 10  # whose best is the rate: about a cycle
CRUISE_ROUNDS = 6  # with fewer, DRAIN costs more of a free link; with more, sharing takes longer
ROUND_TRIP_S = 10.0  # MinRTTFilterLen; of who says too little to have cycles
GROWTH = 1.25
STALLS = 3  # rounds without growth; one may be chance
TOO_MUCH_LOSS = 0.1
LOSS_PACKETS = 50  # where 3 % are lost, a tenth of fewer is often chance
BACK_OFF = 0.85


class Phase(Enum):
    """What the window is for."""

    STARTUP = auto()
    DRAIN = auto()
    CRUISE = auto()
    PROBE = auto()


_GAIN = {Phase.STARTUP: 2.0, Phase.DRAIN: 0.5, Phase.CRUISE: 1.0, Phase.PROBE: 1.25}


class _Known(NamedTuple):
    """What was known when a packet left (draft-cheng-iccrg-delivery-rate-estimation section 3)."""

    delivered: int
    delivered_at: float
    first_sent_at: float


class Controller(QuicCongestionControl):
    """Keeps under way what the path delivers in a round trip."""

    def __init__(self, *, max_datagram_size: int) -> None:
        self.max_datagram_size = max_datagram_size
        self._delivered = 0
        self._delivered_at = self._first_sent_at = 0.0
        self.moved()

    @property
    def bytes_per_s(self) -> float | None:
        """What the path delivers; None until there was once more to send than it took."""
        return max(self._rates) if self._was_full else None

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip of late; None before it is known."""
        shortest = min(self._trips)
        return shortest if math.isfinite(shortest) else None

    def moved(self) -> None:
        """Forget the path and begin anew; what is under way tells nothing of the next one."""
        self._known: dict[int, _Known] = {}
        self._rates = deque([0.0], maxlen=RATE_ROUNDS)  # the best of each round, in bytes/s
        self._trips = (math.inf, math.inf)  # the shortest of this cycle and of the last
        self._trips_at = -math.inf
        self._is_of_path = False  # what was acknowledged last
        self._was_full = False  # in a round, so that the rate is that of the path
        self._phase, self._rounds = Phase.STARTUP, 0  # and how many it has left
        self._full, self._stalls = 0.0, 0
        self._goal = self._delivered
        self._trough = math.inf  # least under way in this round
        self._acked = self._lost = 0
        self._begin(START_PACKETS)

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        """Remember what was known when it left."""
        sent_at = packet.sent_time or 0.0
        if not self.bytes_in_flight:
            self._first_sent_at = self._delivered_at = sent_at
        known = _Known(self._delivered, self._delivered_at, self._first_sent_at)
        self._known[packet.packet_number] = known
        self.bytes_in_flight += packet.sent_bytes

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        """Learn the rate from what was delivered since it left."""
        if now > self._delivered_at:
            self._trough = min(self._trough, self.bytes_in_flight)
        self.bytes_in_flight -= packet.sent_bytes
        self._delivered += packet.sent_bytes
        self._delivered_at = now
        self._acked += packet.sent_bytes
        known = self._known.pop(packet.packet_number, None)
        self._is_of_path = known is not None
        if known is None:
            return
        sent_at = packet.sent_time or 0.0
        self._first_sent_at = sent_at
        elapsed = max(sent_at - known.first_sent_at, now - known.delivered_at)
        if elapsed > 0:
            self._rates[-1] = max(self._rates[-1], (self._delivered - known.delivered) / elapsed)
        if known.delivered >= self._goal:
            self._end_round()

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """Learn the round trip, and set the window; aioquic sets the pace right after."""
        if not self._is_of_path:
            return
        if now > self._trips_at + ROUND_TRIP_S:
            self._trips, self._trips_at = (math.inf, self._trips[0]), now
        self._trips = (min(rtt, self._trips[0]), self._trips[1])
        self._resize()

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        """Count them; a few say nothing."""
        before = self.bytes_in_flight
        self.on_packets_expired(packets=packets)
        self._lost += before - self.bytes_in_flight

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        """Forget them."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._known.pop(packet.packet_number, None)

    def on_persistent_congestion(self) -> None:
        """Begin anew with the least: nothing came through for long (RFC 9002 section 7.6)."""
        self.moved()
        self._begin(LEAST_PACKETS)

    def _begin(self, packets: int) -> None:
        self._floor = self.congestion_window = self._at_most(packets)

    def _at_most(self, packets: int) -> int:
        size = max(START_BYTES, 2 * self.max_datagram_size)
        return min(packets * self.max_datagram_size, size)

    def _end_round(self) -> None:
        """Judge a round, and choose what the next one is for."""
        self._goal = self._delivered
        is_limited = self._trough < self.congestion_window / 2
        self._trough = math.inf
        is_congested = self._is_congested()
        if is_limited:
            self._floor = self._at_most(START_PACKETS)
            return
        self._was_full = True
        if is_congested:
            self._rates = deque([BACK_OFF * self._rates[-1]], maxlen=RATE_ROUNDS)
        self._advance(is_congested=is_congested)
        if self._phase is not Phase.STARTUP:
            self._floor = self._at_most(LEAST_PACKETS)
        self._rates.append(0.0)

    def _is_congested(self) -> bool:
        """Tell whether too much was lost since this was last told."""
        total = self._acked + self._lost
        if total < LOSS_PACKETS * self.max_datagram_size:
            return False
        is_congested = self._lost > TOO_MUCH_LOSS * total
        self._acked = self._lost = 0
        return is_congested

    def _advance(self, *, is_congested: bool) -> None:
        """Go to the next phase when this one has done what it is for."""
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
                self._trips_at = -math.inf  # a cycle is over
                self._enter(
                    Phase.CRUISE, CRUISE_ROUNDS + self._delivered // self.max_datagram_size % 5
                )
            case Phase.CRUISE if self._rounds <= 0:
                self._full = rate
                self._enter(Phase.PROBE, 2)
            case Phase.PROBE if is_congested:
                self._enter(Phase.DRAIN, 1)
            case Phase.PROBE if self._rounds <= 0:
                is_worth_more = rate > (1 + GROWTH) / 2 * self._full  # half of what was offered
                self._full = rate
                self._enter(*(Phase.PROBE, 2) if is_worth_more else (Phase.DRAIN, 1))

    def _enter(self, phase: Phase, rounds: int) -> None:
        self._phase, self._rounds = phase, rounds

    def _resize(self) -> None:
        """Keep under way what fits between here and there, and a little more."""
        rate = max(self._rates)
        window = _GAIN[self._phase] * rate * min(self._trips)
        if self._phase is not Phase.DRAIN:
            window += rate * LATE_S + MORE_PACKETS * self.max_datagram_size
        self.congestion_window = max(self._floor, int(window))


register_congestion_control(NAME, Controller)


def reset_path(quic: QuicConnection, max_datagram_size: int) -> None:
    """Tell a connection that its datagrams go another way, where they may be so long.

    It begins anew with round trip, pace and window (RFC 9000 section 9.4). aioquic knows no such
    move of a client, nor another size, so this sets what it keeps to itself.
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
        controller.moved()
