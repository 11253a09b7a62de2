"""Rings of machines on an unreliable network: tokens are right or absent.

The mutants at the end show that these tests can fail.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshllm.names import SessionId
from meshllm.protocol.session import actions, stage
from meshllm.protocol.session.entry import Entry
from meshllm.protocol.session.messages import Blob, Close, Data, Delivered, Flags, Malformed
from meshllm.protocol.session.stage import MAX_PENDING, Compute, Stage
from meshllm.request import FinishReason
from tests.simulation.ring_world import (
    CALM,
    CROWD,
    DOZE,
    FLOOD,
    INVALID,
    NAPS,
    QUIET,
    RUSH,
    STORM,
    RankStats,
    Simulation,
    Weather,
    authorize,
    play,
)

SEEDS = 200


@cache
def tally_of(weather: Weather, **mutation: Any) -> RankStats:
    """Run all schedules of a weather, once."""
    tally = RankStats()
    for seed in range(SEEDS):
        play(seed, weather, tally, **mutation)
    return tally


@pytest.mark.parametrize(
    "weather",
    [CALM, RUSH, CROWD, DOZE, STORM, NAPS, FLOOD],
    ids=["calm", "rush", "crowd", "doze", "storm", "naps", "flood"],
)
def test_tokens_are_right_or_absent_on_any_network(weather: Weather) -> None:
    ends = tally_of(weather).ends

    assert ends[FinishReason.LENGTH] > 5 * ends["failed"]
    assert ends[FinishReason.CANCELLED] > 0


def test_an_invalid_message_ends_its_session_on_all_ranks_and_no_other() -> None:
    """Caches that are left would be found by the simulation, and so would wrong tokens."""
    ends = tally_of(INVALID).ends

    assert ends[FinishReason.LENGTH] > ends["refused"] > SEEDS / 10
    assert ends["failed"] == 0


def test_a_reliable_ring_sends_one_message_per_hop() -> None:
    for seed in range(SEEDS):
        simulation = Simulation(seed, QUIET)
        simulation.run()
        authorize(simulation)

        rounds = sum(
            -(-len(one.task.prompt) // one.pace.chunk) + len(one.answer) - 1
            for one in simulation.generations.values()
        )
        hops = simulation.ring if simulation.ring > 1 else 0
        closes = hops * len(simulation.generations)
        assert simulation.sent == Counter({Data: hops * rounds, Close: closes})


def test_steps_are_pipelined_cancelled_and_returned() -> None:
    tally = tally_of(CROWD)

    assert 4 < max(tally.flights) <= MAX_PENDING
    assert all(tally.flights[steps] > 150 for steps in (1, 2, 3))
    assert tally.cancels > 150


def test_most_kept_prefixes_are_reused() -> None:
    tally = tally_of(CALM)

    assert 2 * tally.reused > tally.asked > 1000


class Eager(Stage):
    """Ignores gen."""

    def _queue(self, state: Any, data: Data, compute: Compute) -> list[stage.Action]:
        state.gen = 0
        return super()._queue(state, data, compute)


class Careless(Stage):
    """Does not check for gaps."""

    def _queue(self, state: Any, data: Data, compute: Compute) -> list[stage.Action]:
        state.kv_len = max(state.kv_len, data.pos)
        return super()._queue(state, data, compute)


class Forgetful(Stage):
    """Does not remember closed sessions."""

    def _data(self, data: Data, now: float) -> list[stage.Action]:
        self._closed.clear()
        return super()._data(data, now)


class Generous(Stage):
    """Keeps positions that it does not have."""

    def _end(
        self, session: SessionId, keep: int = 0, now: float = 0.0, **whose: bool
    ) -> list[stage.Action]:
        if keep and session in self._sessions:
            self._sessions[session].kv_len = keep
        return super()._end(session, keep, now, **whose)


class Deaf(Stage):
    """Does not pass on that a session has ended."""

    def _malformed(self, message: Malformed, now: float) -> list[stage.Action]:
        return []


class Confident(Stage):
    """Calls rows committed that were drafted."""

    @property
    def committed(self) -> dict[SessionId, int]:
        return {session: state.kv_len for session, state in self._sessions.items()}


class Hasty(Entry):
    """Counts rows that may have held a wrong draft as done."""

    def _keepable(self, least: int | None) -> int:
        return len(self._tokens)


class Certain(Entry):
    """Calls the drafts of a step committed before it is picked."""

    @property
    def committed(self) -> int:
        return self._done


class Boasting(Entry):
    """Calls what comes before each step committed."""

    def _data_of(self, job: actions.Embed, blob: Blob | None) -> Data:
        data = super()._data_of(job, blob)
        return replace(data, flags=data.flags | Flags.COMMITTED)


class Trusting(Entry):
    """Accepts results of any gen."""

    def receive(self, message: Delivered, now: float) -> list[actions.Action]:
        if isinstance(message, Data):
            message = replace(message, gen=self._gen)
        return super().receive(message, now)


class Gullible(Entry):
    """Stays in the same gen after a rejected draft."""

    def _raise_gen(self, *, sends_cancel: bool) -> list[actions.Action]:
        actions = super()._raise_gen(sends_cancel=sends_cancel)
        self._gen -= not self._tries
        return actions


class Steadfast(Entry):
    """Keeps later steps in flight whatever a step yields."""

    def _keep_flight(self, flying: tuple[int, ...] | None) -> list[actions.Action]:
        known = len(self._tokens)
        return super()._keep_flight(
            (0,) * (self._injected - known) if self._injected >= known else None
        )


class Attached(Entry):
    """Picks results of a cancelled flight."""

    def _raise_gen(self, *, sends_cancel: bool) -> list[actions.Action]:
        back = dict(self._back)
        actions = super()._raise_gen(sends_cancel=sends_cancel)
        self._back = back
        return actions


class Repeating(Entry):
    """Accepts a result twice."""

    def _result(self, data: Data, now: float) -> list[actions.Action]:
        self._done = 0
        return super()._result(data, now)


@pytest.mark.parametrize(
    ("weather", "mutation"),
    [
        (CALM, {"crops": False}),
        (RUSH, {"stage": Eager}),
        (STORM, {"stage": Careless}),
        (RUSH, {"stage": Forgetful}),
        (
            replace(FLOOD, cancels=0.6, follow=1.0, patience_s=(2.0,), tokens=16),
            {"stage": Generous},
        ),
        (INVALID, {"stage": Deaf}),
        (CALM, {"stage": Confident}),
        (CROWD, {"stage": Confident}),
        (CALM, {"entry": Hasty}),
        (CROWD, {"entry": Boasting}),
        (CALM, {"entry": Certain}),
        (CALM, {"entry": Trusting}),
        (STORM, {"entry": Repeating}),
        (STORM, {"entry": Gullible}),
        (CROWD, {"crops": False}),
        (CROWD, {"stage": Eager}),
        (CROWD, {"entry": Gullible}),
        (CROWD, {"entry": Steadfast}),
        (CROWD, {"entry": Attached}),
    ],
    ids=[
        "no crop",
        "no gen",
        "no gap",
        "no memory",
        "not there",
        "not passed on",
        "a draft",
        "a draft in a crowd",
        "not done",
        "not committed",
        "not picked",
        "any gen",
        "twice",
        "wrong draft",
        "no crop in a crowd",
        "no gen in a crowd",
        "wrong draft in a crowd",
        "wrong step",
        "old rows",
    ],
)
def test_a_broken_machine_is_caught(weather: Weather, mutation: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        tally_of(weather, **mutation)
