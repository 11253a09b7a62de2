"""Discrete-event simulation of replicas under a load: pure, deterministic, one event at a time.

Theory of operation
-------------------
A request is routed on arrival to the replica of its model with the fewest requests for its speed,
waits there in FIFO order until its tokens fit into the KV caches, is prefilled, joins the running
sessions (continuous batching), and leaves with its last token::

    arrive --> waiting --> prefilling --> draining --> running --> done
       '-----> refused, if it fits no replica of its model

Events are arrivals and changes of these states. Between two of them the number of sessions does not
change and speeds are linear in cached tokens (`ReplicaEngine`), so that many steps are one event.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from meshllm.scheduler.engine import Period, Prefill, ReplicaEngine

_EARLY = 1e-9  # of a step: sessions that end together may differ by rounding


class Arrival(NamedTuple):
    """One request."""

    at_s: float
    model: int
    prompt: int
    """Tokens."""
    answer: int
    """Tokens, one at least."""
    cached: int = 0
    """Tokens of the prompt that a prefix cache holds, so that they need no prefill."""


@dataclass(frozen=True, slots=True)
class SimulatedReplica:
    """A replica of a model in a simulation."""

    model: int
    engine: ReplicaEngine
    weight: float = 1.0
    """Speed relative to that of the other replicas, by which requests are spread."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of the requests of one model that were served; a percentile is one of them."""

    served: int
    refused: int
    tokens: int
    """Of all answers."""
    ttft_s: tuple[float, float, float]
    """Time to first token, queueing included: mean, median, 95th percentile."""
    token_s: tuple[float, float, float]
    """Time per further token: the same."""
    total_s: tuple[float, float, float]
    """From arrival to the last token: the same."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What became of every request."""

    arrivals: Sequence[Arrival]
    replicas: Sequence[int | None]
    """The replica of each request; None if it was refused."""
    first_s: Sequence[float]
    """When each request got its first token; infinite if it was refused."""
    done_s: Sequence[float]
    """When each request got its last token."""
    presence_s: Sequence[float]
    """Integral over time of the requests in each replica."""
    tokens: Sequence[float]
    """Made by each replica, counted by steps."""

    @property
    def end_s(self) -> float:
        """When the last request left."""
        return max((done for done in self.done_s if done < inf), default=0.0)

    @property
    def mean_s(self) -> float:
        """Mean time of a request from arrival to its last token; infinite if one was refused."""
        pairs = zip(self.arrivals, self.done_s, strict=True)
        return sum(done - each.at_s for each, done in pairs) / max(1, len(self.arrivals))

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers, by the time until the last of them."""
        return sum(self.tokens) / self.end_s if self.end_s else 0.0

    def latencies(self, model: int) -> Latencies:
        """Summarise the requests of one model."""
        chosen = [at for at, each in enumerate(self.arrivals) if each.model == model]
        served = [at for at in chosen if self.replicas[at] is not None]
        rows = [(self.arrivals[at], self.first_s[at], self.done_s[at]) for at in served]
        return Latencies(
            served=len(served),
            refused=len(chosen) - len(served),
            tokens=sum(each.answer for each, _, _ in rows),
            ttft_s=_summary([first - each.at_s for each, first, _ in rows]),
            token_s=_summary(
                [
                    (done - first) / (each.answer - 1)
                    for each, first, done in rows
                    if each.answer > 1
                ]
            ),
            total_s=_summary([done - each.at_s for each, _, done in rows]),
        )


def simulate(replicas: Sequence[SimulatedReplica], arrivals: Sequence[Arrival]) -> Simulation:
    """Run requests, in order of time, through replicas until all have left."""
    log = _Log([None] * len(arrivals), [inf] * len(arrivals), [inf] * len(arrivals))
    queues = [_ReplicaQueue(each, arrivals, log) for each in replicas]
    by_model: dict[int, list[int]] = {}
    for number, each in enumerate(replicas):
        by_model.setdefault(each.model, []).append(number)
    events: list[tuple[float, int, int]] = []  # time, replica, its version
    for at, arrival in enumerate(arrivals):
        _run(queues, events, arrival.at_s)
        tokens = arrival.prompt + arrival.answer
        allowed = [
            number
            for number in by_model.get(arrival.model, ())
            if replicas[number].engine.room_tokens >= tokens
        ]
        if not allowed:
            continue
        number = min(allowed, key=lambda each: queues[each].load)
        log.replica[at] = number
        queues[number].add(at, arrival.at_s)
        heappush(events, (queues[number].next_s, number, queues[number].version))
    _run(queues, events, inf)
    return Simulation(
        arrivals,
        log.replica,
        log.first_s,
        log.done_s,
        [queue.presence_s for queue in queues],
        [queue.tokens for queue in queues],
    )


def _run(
    queues: Sequence["_ReplicaQueue"], events: list[tuple[float, int, int]], until_s: float
) -> None:
    """Handle the events of all replicas until a time."""
    while events and events[0][0] <= until_s:
        now, number, version = heappop(events)
        queue = queues[number]
        if version != queue.version or now == inf:
            continue
        queue.expire(now)
        heappush(events, (queue.next_s, number, queue.version))


@dataclass(frozen=True, slots=True)
class _Log:
    replica: list[int | None]
    first_s: list[float]
    done_s: list[float]


@dataclass(slots=True)
class _ReplicaQueue:
    """The requests in one replica."""

    replica: SimulatedReplica
    arrivals: Sequence[Arrival]
    log: _Log
    now: float = 0.0
    next_s: float = inf
    """Time of its next event."""
    version: int = 0
    """Counts changes: an event planned before the last one is void."""
    presence_s: float = 0.0
    tokens: float = 0.0
    _waiting: deque[int] = field(default_factory=deque)
    _prefilling: tuple[int, Prefill] | None = None
    _chunks: float = 0.0
    """Left of the prompt."""
    _draining: list[tuple[float, int, Prefill]] = field(default_factory=list)
    """Heap of when they run; until then later ranks compute their last chunks."""
    _running: list[tuple[float, int]] = field(default_factory=list)
    """Heap of the count of steps after which they are done."""
    _steps: float = 0.0
    _cached: float = 0.0
    """Tokens in the caches of running sessions."""
    _reserved: int = 0
    """Tokens for which the caches of all sessions need room."""
    _period: Period = field(default_factory=lambda: Period(inf, 0.0))
    _rate: float = 0.0
    """Chunks per second."""
    _prefilled_s: float = inf
    """When the prompt is through."""
    _finish_s: float = inf
    """When the next session is done."""

    @property
    def load(self) -> float:
        """Requests, counting one more, for its speed."""
        return (len(self._waiting) + self._active + 1) / self.replica.weight

    @property
    def _active(self) -> int:
        return (self._prefilling is not None) + len(self._draining) + len(self._running)

    def add(self, request: int, now: float) -> None:
        """Take a request."""
        self._advance(now)
        self._waiting.append(request)
        self._plan()

    def expire(self, now: float) -> None:
        """Handle what is due."""
        self._advance(now)
        if now >= self._finish_s:  # whatever rounding left
            self._steps = max(self._steps, self._running[0][0])
        if self._prefilling is not None and now >= self._prefilled_s:
            request, prefill = self._prefilling
            heappush(self._draining, (now + prefill.drain_s, request, prefill))
            self._prefilling = None
        while self._draining and self._draining[0][0] <= now:
            self._join(heappop(self._draining)[1])
        while self._running and self._running[0][0] <= self._steps + _EARLY:
            self._finish(heappop(self._running)[1])
        self._plan()

    def _advance(self, now: float) -> None:
        passed = now - self.now
        self.now = now
        self.presence_s += passed * (len(self._waiting) + self._active)
        if sessions := len(self._running):
            steps = self._period.steps(passed, self._cached, sessions)
            self._steps += steps
            self._cached += steps * sessions
            self.tokens += steps * sessions
        if self._prefilling is not None:
            self._chunks -= passed * self._rate

    def _join(self, request: int) -> None:
        self.log.first_s[request] = self.now
        self.tokens += 1
        prompt, answer = self.arrivals[request][2:4]
        self._cached += prompt
        heappush(self._running, (self._steps + answer - 1, request))

    def _finish(self, request: int) -> None:
        self.log.done_s[request] = self.now
        prompt, answer = self.arrivals[request][2:4]
        self._reserved -= prompt + answer
        self._cached = self._cached - (prompt + answer - 1) if self._running else 0.0

    def _plan(self) -> None:
        """Start the next prefill, and set speeds and the time of the next event."""
        engine, sessions = self.replica.engine, len(self._running)
        if self._prefilling is None and self._waiting and self._active < engine.max_sessions:
            self._admit(engine)
        prefill = self._prefilling[1] if self._prefilling is not None else None
        last = self._draining[0][2] if self._draining else None
        if prefill is not None and sessions:
            self._period, self._rate = engine.mixed(sessions, self._cached, prefill)
        elif prefill is not None:
            self._rate = 1 / prefill.interval_s
        elif sessions and last is not None and len(last.ranks) > 1:
            later = replace(last, ranks=(0.0, *last.ranks[1:]))  # the first one is done with it
            self._period, _ = engine.mixed(sessions, self._cached, later)
        elif sessions:
            self._period = engine.decode(sessions, self._cached)
        self._prefilled_s = self._finish_s = inf
        if prefill is not None:
            self._prefilled_s = self.now + max(0.0, self._chunks) / self._rate
        if sessions:
            steps = max(0.0, self._running[0][0] - self._steps)
            seconds = self._period.seconds(steps, self._cached, sessions)
            self._finish_s = self.now + seconds
        running_s = self._draining[0][0] if self._draining else inf
        self.next_s = min(self._prefilled_s, self._finish_s, running_s)
        self.version += 1

    def _admit(self, engine: ReplicaEngine) -> None:
        prompt, answer, cached = self.arrivals[self._waiting[0]][2:]
        if self._reserved + prompt + answer > engine.room_tokens:
            return
        prefill = engine.prefill(prompt - cached)
        self._prefilling = self._waiting.popleft(), prefill
        self._reserved += prompt + answer
        self._chunks = float(prefill.chunks)


def _summary(values: list[float]) -> tuple[float, float, float]:
    """Return mean, median and 95th percentile; zeros if there are none."""
    if not values:
        return 0.0, 0.0, 0.0
    ordered = sorted(values)
    last = len(ordered) - 1
    return sum(ordered) / len(ordered), ordered[last // 2], ordered[ceil(last * 0.95)]
