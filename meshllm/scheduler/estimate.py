"""The mean time of a request on replicas, in closed form: what the search compares placements by.

Theory of operation
-------------------
If B sessions run at once, a step takes ``d`` seconds, or ``m`` beside a prefill, and a prompt takes
``k`` seconds of prefill. At a rate of r requests per second with answers of A tokens, prefill takes
the share r * k of the time, so that each session makes (1 - r * k) / d + r * k / m tokens per
second, and all of them r * A::

    r = B / (A * d + B * k * (1 - d / m))

The largest such rate is the capacity. Waiting for one of c places is that of c servers in parallel
(Sakasegawa, 1977), waiting for the prefill that of one. Beyond the capacity c the queue grows for
as long as the load lasts, and is served after that: who comes at t waits for t * (r / c - 1). So of
two models the one that is further beyond its capacity gains more from one more replica.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

from meshllm.scheduler.engine import ReplicaEngine
from meshllm.scheduler.load import ModelLoad

HORIZON_S = 600.0
"""How long a load lasts: a queue that grows is judged by the requests that come in this time."""
UNSERVED_S = 1e6
"""Time of a request for a model without a replica: worse than any queue."""

_FULL = 0.98  # of the capacity: the highest load for which waiting times are computed


@dataclass(frozen=True, slots=True)
class _LoadState:
    """A replica with a number of sessions running."""

    rate: float
    service_time_s: float
    """Of a request, without waiting for a place."""


class Estimate:
    """One replica under the mean request of a load."""

    def __init__(self, engine: ReplicaEngine, load: ModelLoad) -> None:
        self._engine = engine
        self._prompt = max(1, round(load.prompt.mean))
        self._prefilled = max(1, round(load.prompt.mean * (1 - load.cached)))
        self._answer = load.answer.mean
        fitting = int(engine.room_tokens / (self._prompt + self._answer))
        self.places = max(1, min(engine.max_sessions, fitting))
        """Sessions that can run at once."""

    @property
    def capacity(self) -> float:
        """Requests per second, at most."""
        return self._states[-1].rate

    def service_time_s(self, rate: float) -> float:
        """Return the mean time of a request, without waiting for a place."""
        states = self._states
        at = bisect_left(states, rate, key=lambda state: state.rate)
        if at == 0 or at == len(states):
            return states[min(at, len(states) - 1)].service_time_s
        low, high = states[at - 1], states[at]
        share = (rate - low.rate) / (high.rate - low.rate)
        return low.service_time_s + (high.service_time_s - low.service_time_s) * share

    @cached_property
    def _states(self) -> list[_LoadState]:
        """List states of rising rates; the first one is that of no load."""
        counts = {1 << power for power in range(self.places.bit_length())} | {self.places}
        found: list[_LoadState] = [_LoadState(0.0, self._state(1).service_time_s)]
        for sessions in sorted(counts):
            state = self._state(sessions)
            if state.rate > found[-1].rate:
                found.append(state)
        return found

    def _state(self, sessions: int) -> _LoadState:
        engine, answer = self._engine, max(self._answer - 1, 0.0)
        cached = sessions * (self._prompt + self._answer / 2)
        prefill = engine.prefill(self._prefilled)
        step = engine.decode(sessions, cached)
        mixed, chunk_rate = engine.mixed(sessions, cached, prefill)
        step_s = step.base + step.slope * cached
        mixed_s = max(step_s, mixed.base + mixed.slope * cached)
        prefill_s = prefill.chunks / chunk_rate
        slowed = 1 - step_s / mixed_s
        busy_s = answer * step_s + sessions * prefill_s * slowed
        rate = _FULL / prefill_s  # of prefill alone
        if busy_s:
            rate = min(rate, sessions / busy_s)
        busy = rate * prefill_s
        first_s = prefill_s / (1 - busy) + prefill.drain_s
        return _LoadState(rate, first_s + answer * step_s / (1 - busy * slowed))


def mean_time(replicas: Sequence[Estimate], rate: float) -> float:
    """Return the mean time of the requests of one model on its replicas, in seconds."""
    capacity = sum(each.capacity for each in replicas)
    if not replicas:
        return UNSERVED_S
    load = min(rate / capacity, _FULL)
    shares = [each.capacity / capacity for each in replicas]
    service_time_s = sum(
        share * each.service_time_s(load * each.capacity)
        for share, each in zip(shares, replicas, strict=True)
    )
    places = sum(each.places for each in replicas)
    wait_s = service_time_s * float(load ** (sqrt(2 * (places + 1)) - 1)) / (places * (1 - load))
    excess = max(0.0, rate / (_FULL * capacity) - 1)
    return min(UNSERVED_S / 2, service_time_s + wait_s + excess * HORIZON_S / 2)
