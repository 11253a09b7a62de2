"""Laws of the simulator: nothing is lost, work is conserved, and it agrees with single steps."""

from collections import deque
from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.protocol.planning.plan import LinkSpeed
from meshllm.scheduler.simulator import Arrival, SimulatedReplica, Simulation, simulate
from tests.builders.replicas import STEP_S, arrivals, engine
from tests.property import strategies as _profile  # noqa: F401  # no deadline

pytestmark = pytest.mark.property

ROOM = 1200
requests = st.lists(
    st.tuples(st.floats(0, 1), st.integers(1, 900), st.integers(1, 400)), min_size=1, max_size=40
).map(arrivals)


def replica_lists(cached: st.SearchStrategy[float]) -> st.SearchStrategy[list[SimulatedReplica]]:
    one = st.builds(
        _replica,
        st.integers(1, 4),
        st.sampled_from([0.0, 0.001, 0.1]),
        st.integers(1, 32),
        cached,
        st.booleans(),
        st.sampled_from([0.5, 1.0, 3.0]),
    )
    return st.lists(one, min_size=1, max_size=3)


def _replica(
    ranks: int, latency: float, most: int, cached: float, merging: bool, weight: float
) -> SimulatedReplica:
    merging = merging and ranks == 1
    wire = LinkSpeed(latency)
    ring = engine(ranks, wire, cached_s=cached, most=most, room=ROOM, merging=merging)
    return SimulatedReplica(0, ring, weight)


replicas = replica_lists(st.sampled_from([0.0, 1e-6]))


@given(replicas, requests)
def test_every_request_is_served_once_or_refused(
    choices: list[SimulatedReplica], asked: list[Arrival]
) -> None:
    found = simulate(choices, asked)

    for each, replica, first, done in zip(
        asked, found.replicas, found.first_s, found.done_s, strict=True
    ):
        if each.prompt + each.answer > ROOM:
            assert (replica, first, done) == (None, inf, inf)
        else:
            assert each.at_s < first <= done < inf


@given(replicas, requests)
def test_tokens_made_are_those_of_the_answers(
    choices: list[SimulatedReplica], asked: list[Arrival]
) -> None:
    found = simulate(choices, asked)

    for number, made in enumerate(found.tokens):
        answers = sum(each.answer for each in served(found, number))
        assert made == pytest.approx(answers, rel=1e-6, abs=1e-6)


@given(replicas, requests)
def test_presence_is_arrivals_times_their_stay(
    choices: list[SimulatedReplica], asked: list[Arrival]
) -> None:
    """Little, 1961: L = lambda W, here for the whole run of each replica."""
    found = simulate(choices, asked)

    for number, presence in enumerate(found.presence_s):
        stays = sum(
            done - each.at_s
            for each, replica, done in zip(asked, found.replicas, found.done_s, strict=True)
            if replica == number
        )
        assert presence == pytest.approx(stays, rel=1e-6, abs=1e-9)


@given(replica_lists(st.just(0.0)), requests)  # the time of caches is that of their mean
def test_no_session_is_faster_than_alone(
    choices: list[SimulatedReplica], asked: list[Arrival]
) -> None:
    found = simulate(choices, asked)

    for at, each in enumerate(asked):
        if (number := found.replicas[at]) is not None:
            chosen = choices[number].engine
            alone = simulate([SimulatedReplica(0, chosen)], [each])
            assert found.first_s[at] >= alone.first_s[0] - 1e-9
            assert found.done_s[at] >= alone.done_s[0] - 1e-6


@given(requests)
def test_the_same_requests_give_the_same_run(asked: list[Arrival]) -> None:
    runs = [
        simulate([SimulatedReplica(0, engine(3, LinkSpeed(0.01)))] * 2, asked) for _ in range(2)
    ]

    assert runs[0] == runs[1]


@given(requests, st.integers(1, 8), st.sampled_from([0.0, 1e-6]))
def test_jumps_agree_with_single_steps(asked: list[Arrival], most: int, cached_s: float) -> None:
    """Requests of one engine, against a loop over its iterations: a chunk, then a step of all."""
    asked = [each for each in asked if each.prompt + each.answer <= ROOM]
    found = simulate([SimulatedReplica(0, engine(cached_s=cached_s, most=most))], asked)

    stepped = step_by_step(asked, most, cached_s)

    iteration_s = 3 * STEP_S * (1 + len(asked) / 100) + cached_s * ROOM * most
    assert len(stepped) == len(asked)
    for at, (first, done) in enumerate(stepped):
        allowed = (2 + most + len(asked)) * iteration_s
        assert found.first_s[at] == pytest.approx(first, rel=0.02, abs=allowed)
        assert found.done_s[at] == pytest.approx(done, rel=0.02, abs=allowed)
    if asked:
        end_s = max(done for _, done in stepped)
        assert found.end_s == pytest.approx(end_s, rel=0.02, abs=4 * iteration_s)


def served(found: Simulation, number: int) -> list[Arrival]:
    pairs = zip(found.arrivals, found.replicas, strict=True)
    return [each for each, replica in pairs if replica == number]


def step_by_step(asked: list[Arrival], most: int, cached_s: float) -> list[tuple[float, float]]:
    """Simulate one engine naively; return when each request got its first and its last token."""
    stepped = Stepped(asked, most, cached_s)
    while stepped.take():
        stepping = list(stepped.running)
        stepped.chunk()
        stepped.step(stepping)
    return list(zip(stepped.first, stepped.done, strict=True))


class Stepped:
    """An engine that alternates between a chunk and a step of all sessions."""

    def __init__(self, asked: list[Arrival], most: int, cached_s: float) -> None:
        self.asked, self.most, self.cached_s = asked, most, cached_s
        self.now = 0.0
        self.first, self.done = [inf] * len(asked), [inf] * len(asked)
        self.coming, self.waiting = deque(range(len(asked))), deque[int]()
        self.running: dict[int, int] = {}  # tokens made
        self.prefilling: tuple[int, int] | None = None  # a request and its chunks left

    def take(self) -> bool:
        """Take what has arrived; return whether anything is left to do."""
        if self.coming and not (self.waiting or self.running or self.prefilling):
            self.now = max(self.now, self.asked[self.coming[0]].at_s)
        while self.coming and self.asked[self.coming[0]].at_s <= self.now:
            self.waiting.append(self.coming.popleft())
        if self.prefilling is None and self.waiting and len(self.running) < self.most:
            at = self.waiting.popleft()
            self.prefilling = at, ceil(self.asked[at].prompt / 64)
        return bool(self.coming or self.waiting or self.running or self.prefilling)

    def chunk(self) -> None:
        if self.prefilling is None:
            return
        at, left = self.prefilling
        self.now += engine().prefill(self.asked[at].prompt).interval_s
        self.prefilling = (at, left - 1) if left > 1 else None
        if left == 1:
            self.first[at], self.running[at] = self.now, 1

    def step(self, stepping: list[int]) -> None:
        if stepping:
            cached = sum(self.asked[at].prompt + self.running[at] - 1 for at in stepping)
            rows = len(stepping) - 1
            self.now += STEP_S * (1 + rows / 100) + self.cached_s * cached
        for at in stepping:
            self.running[at] += 1
        for at in [at for at, made in self.running.items() if made >= self.asked[at].answer]:
            self.done[at] = self.first[at] if self.asked[at].answer == 1 else self.now
            del self.running[at]
