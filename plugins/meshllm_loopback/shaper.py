"""Traffic shaping: the arrival times of messages over a link with delay, jitter, rate and loss.

The model of one direction of a link:

- A message is transmitted after those before it, at ``bytes_per_s``. CONTROL has priority: it does
  not wait for DATA, and DATA sent later waits for it.
- The propagation delay is ``delay_s`` plus a uniform jitter of up to ``jitter_s``.
- Each transmission is lost with probability ``loss``. The link is reliable, so a loss costs time:
  the message is retransmitted one round trip later, as often as it is lost.
- One channel is in order, with head-of-line blocking. Channels and links overtake each other.

The random draws depend on the seed, the link, the channel and the number of earlier messages on
that channel, not on a clock.
"""

from dataclasses import dataclass
from math import inf
from random import Random

from meshllm.errors import UserError
from meshllm.transport.contract import Channel


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Delay, jitter, rate and loss of one direction of a link."""

    delay_s: float = 0.0
    """One way, in seconds."""
    jitter_s: float = 0.0
    """Upper bound of what is added to the delay, in seconds."""
    bytes_per_s: float = inf
    """Rate at which messages leave."""
    loss: float = 0.0
    """Probability that a transmission is lost, below 1."""
    seed: int = 0
    """The same seed, link and messages give the same times."""

    def __post_init__(self) -> None:
        if not (0 <= self.delay_s < inf and 0 <= self.jitter_s < inf):
            raise UserError(f"Invalid delay: {self.delay_s} s + {self.jitter_s} s")
        if not self.bytes_per_s > 0:
            raise UserError(f"Invalid rate: {self.bytes_per_s} B/s")
        if not 0 <= self.loss < 1:
            raise UserError(f"Invalid loss {self.loss}: not in [0, 1)")


class Shaper:
    """Arrival times for one direction of one link; the link's name is part of the seed."""

    def __init__(self, shape: TrafficShape, link: str) -> None:
        self.bytes_per_s = shape.bytes_per_s
        self._shape = shape
        self._draw = {
            channel: Random(f"{shape.seed} {link} {channel.name}")  # the same in each process
            for channel in Channel
        }
        self._free = dict.fromkeys(Channel, -inf)  # s; when the next transmission can start
        self._last = dict.fromkeys(Channel, -inf)  # s; arrival of the previous message

    def arrival(self, channel: Channel, size: int, now: float) -> float:
        """Return when a message of ``size`` bytes, sent now, arrives: seconds on the same clock."""
        shape, draw = self._shape, self._draw[channel]
        duration = size / shape.bytes_per_s
        sent = max(now, self._free[channel]) + duration
        self._free[channel] = sent
        if channel is Channel.CONTROL:
            self._free[Channel.DATA] = max(now, self._free[Channel.DATA]) + duration

        travel = shape.delay_s + draw.random() * shape.jitter_s
        while draw.random() < shape.loss:
            travel += 2 * shape.delay_s + duration
        self._last[channel] = max(self._last[channel], sent + travel)
        return self._last[channel]
