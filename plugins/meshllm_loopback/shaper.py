"""When a message arrives over a slow link.

The model of one direction of a link:

- A message leaves after those before it, at ``bytes_per_s``. CONTROL goes first: it does not wait
  for DATA, and the DATA that leaves later waits for it.
- It travels ``delay_s`` plus up to ``jitter_s``, drawn evenly.
- Each transmission is lost with probability ``loss``. The link is reliable, so loss is time: the
  message leaves again one round trip later, as often as it is lost.
- One channel is in order: what is late holds back those behind it. Channels and links overtake
  each other freely.

The draws depend on seed, link, channel and the messages before on that channel, and on no clock.
"""

from dataclasses import dataclass
from math import inf
from random import Random

from meshllm.errors import UserError
from meshllm.transport.contract import Channel


@dataclass(frozen=True, slots=True)
class Shape:
    """How slow one direction of a link is."""

    delay_s: float = 0.0
    """One way, in seconds."""
    jitter_s: float = 0.0
    """At most so much is added to the delay, in seconds."""
    bytes_per_s: float = inf
    """Rate at which messages leave."""
    loss: float = 0.0
    """Probability that a transmission is lost, below 1."""
    seed: int = 0
    """Same seed, same link, same messages: same times."""

    def __post_init__(self) -> None:
        if not (0 <= self.delay_s < inf and 0 <= self.jitter_s < inf):
            raise UserError(f"A delay of {self.delay_s} s + {self.jitter_s} s is not possible")
        if not self.bytes_per_s > 0:
            raise UserError(f"A rate of {self.bytes_per_s} B/s carries nothing")
        if not 0 <= self.loss < 1:
            raise UserError(f"A loss of {self.loss} is not in [0, 1)")


class Shaper:
    """Draws the arrival times for one direction of one link, whose name seeds the draws."""

    def __init__(self, shape: Shape, link: str) -> None:
        self.bytes_per_s = shape.bytes_per_s
        self._shape = shape
        self._draw = {
            channel: Random(f"{shape.seed} {link} {channel.name}")  # str: the same in each process
            for channel in Channel
        }
        self._free = dict.fromkeys(Channel, -inf)  # s; when the next message may leave
        self._last = dict.fromkeys(Channel, -inf)  # s; arrival of the message before

    def arrival(self, channel: Channel, size: int, now: float) -> float:
        """Tell when a message of ``size`` bytes, sent now, arrives: seconds on the same clock."""
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
