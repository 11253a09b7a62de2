"""Ring link to one neighbour: handshake, liveness and round trip of a connection.

Theory of operation
-------------------
::

    DIALING --Hello--> OPEN --silence--> GONE
       '------silence or a fault----------^

Each side sends its Hello at once, without waiting for the other's; receiving one opens this end.
Messages are in order, so the first one of an honest neighbour is its Hello: anything else while
dialing is a fault, and so is a second Hello. A Hello for another epoch or plan is refused here, so
the layers above never see a message of another ring.

Every message proves that the neighbour is alive, even one of an unknown kind. A side that sends
nothing for `BEAT` sends a Beat (keep-alive), and one each `MEASURE` however busy the link is,
because only beats measure the round trip: the other side returns the last stamp and how long it
held it (as RTP does, RFC 3550 section 6.4.1).

A message of a session with invalid content is delivered as `Malformed`, to end that session only;
further ones of it are dropped, but for its Close. Each one that is delivered makes the rank send
something to the entry, so more than `MAX_MALFORMED` of them in `MALFORMED_S` are a fault. So is one
before the first Beat: until then no fault of the neighbour is counted, as it may follow another
plan, so that one that never sends a Beat could end sessions for good.

`SILENCE` without a message is loss. A message that has arrived but was not read races with that
deadline, and wins: when a call is late, this side was suspended, and the neighbour gets one more
`BEAT`. Beats that are read in that time may have waited, and measure no round trip.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import get_args

from meshllm.errors import PeerFault
from meshllm.names import NodeId, SessionId, short
from meshllm.protocol.binary import micros
from meshllm.protocol.session.messages import (
    Delivered,
    Heartbeat,
    Hello,
    KvOffer,
    KvRows,
    Malformed,
    Message,
    UnknownRingMessage,
)

BEAT = 0.5  # s; six beats within SILENCE
MEASURE = 5.0  # s; ten beats: a path that moves from relay to direct shows within seconds
SILENCE = 3.0  # s; long enough for a retransmission on a bad radio
MAX_MALFORMED, MALFORMED_S = 16, 60.0  # in so many s; one for each session of a rank, and its Close
_GAIN = 1 / 8  # of a new round trip in the smoothed one (RFC 6298, alpha)


class LinkState(Enum):
    """State of a link."""

    DIALING = auto()
    OPEN = auto()
    GONE = auto()


_NEXT: dict[LinkState, dict[type[Message | Malformed], LinkState]] = {
    LinkState.DIALING: {Hello: LinkState.OPEN},
    LinkState.OPEN: dict.fromkeys(
        (Heartbeat, UnknownRingMessage, KvOffer, KvRows, *get_args(Delivered)), LinkState.OPEN
    ),
}


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the neighbour."""

    message: Hello | Heartbeat


@dataclass(frozen=True, slots=True)
class Deliver:
    """The neighbour sent this for a session."""

    message: Delivered


@dataclass(frozen=True, slots=True)
class Lost:
    """The neighbour is gone; close the connection."""

    text: str


Action = Send | Deliver | Lost


class NeighbourLink:
    """The state of one connection to a neighbour; times are seconds on the driver's clock."""

    def __init__(self, hello: Hello, *, peer: NodeId | None = None) -> None:
        self.state = LinkState.DIALING
        self.peer = peer
        """The neighbour's id; given if only one node is acceptable, else learned from its Hello."""
        self.round_trip_us = 0
        """Smoothed round trip; 0 until it is measured."""
        self.is_met = False
        """The neighbour has our Hello: it sent a Beat, which only an open side does. Messages of
        sessions wait for it, because the channels of a link are not ordered among each other."""
        self._hello = hello
        self._is_opened = False
        self._heard = self._sent = self._beaten = 0.0
        self._awake = -inf  # when this side was last noticed to have been suspended
        self._malformed: dict[tuple[SessionId, bool], float] = {}  # when each first came
        self._echo: tuple[int, float] | None = None  # their last stamp, and when it was received

    def open(self, now: float) -> list[Action]:
        """Start, once the connection is established; a second call does nothing."""
        if self._is_opened:
            return []
        self._is_opened = True
        self._heard = self._sent = now
        return [Send(self._hello)]

    def receive(self, message: Message | Malformed, now: float) -> list[Action]:
        """Handle a message from the neighbour; raise `PeerFault` if it does not fit the state."""
        if self.state is LinkState.GONE:
            return []
        self._notice_suspension(now)
        state, self.state = self.state, LinkState.GONE
        if type(message) not in _NEXT[state]:
            raise PeerFault(f"{type(message).__name__} while {state.name.lower()}")
        if isinstance(message, Hello):
            self._check_hello(message)
        is_repeated = isinstance(message, Malformed) and self._is_repeated(message, now)
        self.state, self._heard = _NEXT[state][type(message)], now
        match message:
            case Hello():
                return [self._beat(now)]
            case Heartbeat():
                self.is_met = True
                self._measure(message, now)
                return []
            case UnknownRingMessage() | KvOffer() | KvRows():  # the last two have their own link
                return []
            case _:
                return [] if is_repeated else [Deliver(message)]

    def sent(self, now: float) -> None:
        """Note that something was sent to the neighbour, which postpones the next beat."""
        self._sent = now

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do; None once the link is gone."""
        if self.state is LinkState.GONE:
            return None
        silent = self._heard + SILENCE
        return silent if self.state is LinkState.DIALING else min(silent, self._next_beat)

    def expire(self, now: float) -> list[Action]:
        """Do what is due: a beat, or the end of a silent link."""
        if self.deadline is None or now < self.deadline:
            return []
        self._notice_suspension(now)
        if now >= self._heard + SILENCE:
            self.state = LinkState.GONE
            return [Lost(f"No message from the neighbour for {now - self._heard:.1f} s")]
        return [self._beat(now)] if self.state is LinkState.OPEN else []

    def _notice_suspension(self, now: float) -> None:
        if (deadline := self.deadline) is not None and now > deadline + BEAT:
            self._heard, self._awake = max(self._heard, now + BEAT - SILENCE), now

    @property
    def _next_beat(self) -> float:
        return min(self._sent + BEAT, self._beaten + MEASURE)

    def _beat(self, now: float) -> Send:
        self._sent = self._beaten = now
        stamp, heard = self._echo or (0, now)
        return Send(Heartbeat(micros(now), stamp, micros(now - heard)))

    def _check_hello(self, hello: Hello) -> None:
        ours, theirs = self._hello, hello
        if theirs.epoch != ours.epoch:
            raise PeerFault(f"The neighbour is at epoch {theirs.epoch}, this node at {ours.epoch}")
        if theirs.plan != ours.plan:
            raise PeerFault(
                f"The neighbour follows plan `{theirs.plan.hex()[:12]}`, this node"
                f" `{ours.plan.hex()[:12]}`, both at epoch {ours.epoch}"
            )
        if self.peer not in {None, theirs.node}:
            raise PeerFault(f"Unexpected node `{short(theirs.node)}` at the other end")
        self.peer = theirs.node

    def _is_repeated(self, message: Malformed, now: float) -> bool:
        """Note an invalid message; return whether its session has had one like it."""
        if not self.is_met:
            raise PeerFault(message.text)
        known, key = self._malformed, (message.session, message.is_close)
        self._malformed = known = {k: at for k, at in known.items() if now < at + MALFORMED_S}
        if key in known:
            return True
        if len(known) == MAX_MALFORMED:
            raise PeerFault(
                f"More than {MAX_MALFORMED} invalid messages of sessions in {MALFORMED_S:.0f} s,"
                f" the last one: {message.text}"
            )
        known[key] = now
        return False

    def _measure(self, beat: Heartbeat, now: float) -> None:
        if now < self._awake + BEAT:
            return  # it may have waited; an earlier echo stays right
        self._echo = (beat.stamp, now)
        sample = micros(now) - beat.echo - beat.held
        # No echo yet, or of a stamp that is not ours: no beat takes longer than SILENCE.
        if beat.echo == 0 or not 0 <= sample <= micros(SILENCE):
            return
        smoothed = self.round_trip_us or sample
        self.round_trip_us = round(smoothed + _GAIN * (sample - smoothed))
