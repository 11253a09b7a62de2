"""A node in one ring: what it follows and has loaded, and whether the ring serves."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from meshllm.errors import ModelError
from meshllm.model.steps.execution import Execution, Strategy
from meshllm.names import LossCause, NodeId, short
from meshllm.protocol.membership.records import Lifecycle, StateRecord
from meshllm.protocol.planning.chunking import ring_times
from meshllm.protocol.ring.plan_change import PlanChangeInput
from meshllm.testing.clock import run_virtual
from tests.builders.offers import C
from tests.builders.ring_places import (
    AGREEMENT,
    ALONE,
    ENTRY,
    LATER,
    PLAN,
    STAGE,
    Place,
    loaded,
    several,
)
from tests.builders.snapshots import charter


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def test_a_node_without_a_model_is_joining() -> None:
    async def scenario() -> None:
        place = Place()
        place.own.publish()
        assert place.told == []  # nothing has changed
        assert (place.member.plan, place.own.sessions) == (None, 0)
        assert place.member.serving_entry() is None
        assert place.member.reason == "nobody"

    run(scenario)


def test_all_that_runs_here_is_told() -> None:
    async def scenario() -> None:
        place, layers = Place(), Execution(Strategy.REPLAYED, attention="own")
        slow = replace(layers, strategy=Strategy.INVARIANT, reason="no replay: it draws")
        first, second, head = (
            SimpleNamespace(name=name, execution=found)
            for name, found in (("layers 0:1", layers), ("layers 1:2", slow), ("LM head", layers))
        )

        def told(runners: list[SimpleNamespace], draft: Execution | None, refusal: str) -> str:
            place.work(SimpleNamespace(runners=runners, draft_execution=draft))
            place.member.model = cast("Any", SimpleNamespace(refused_gpu=refusal))
            return place.member.execution

        place.serve()
        assert told([first, head], None, "") == str(layers)
        assert told([first, second, head], slow, "") == (
            f"layers 0:1, LM head: {layers}; layers 1:2: {slow}; draft model: {slow}"
        )
        assert told([first], None, "too old") == "replayed (too old); attention: own"

    run(scenario)


def test_all_nodes_of_a_broken_ring_are_probed() -> None:
    async def scenario() -> None:
        place = Place()
        place.member.broke(PLAN)
        assert place.probed == [ENTRY, STAGE]

    run(scenario)


def test_a_ring_is_whole_while_all_nodes_have_loaded_and_this_one_serves() -> None:
    async def scenario() -> None:
        place, told = Place(), list[bool]()

        def look() -> None:
            told.append(place.member.plan_change_input(LATER, 0.5).is_whole)

        look()
        place.serve()
        place.states |= {ENTRY: loaded(), STAGE: loaded()}
        look()
        place.work()
        look()
        assert place.member.plan_change_input(None, 0.5) == PlanChangeInput(
            None, PLAN, 0.5, is_whole=True
        )
        place.states[STAGE] = loaded(LATER)
        look()
        assert told == [False, False, True, False]

    run(scenario)


def test_what_other_nodes_have_prepared_or_follow_is_known_while_they_are_there() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.states |= {ENTRY: loaded(LATER), STAGE: replace(loaded(), prepared=LATER.digest)}
        plan_change_input = place.member.plan_change_input(LATER, 0.5)
        assert (set(plan_change_input.prepared), plan_change_input.is_begun) == (
            {ENTRY, STAGE},
            False,
        )
        place.states[STAGE] = loaded(LATER)
        assert place.member.plan_change_input(LATER, 0.5).is_begun
        place.alive.discard(STAGE)
        plan_change_input = place.member.plan_change_input(LATER, 0.5)
        assert (set(plan_change_input.prepared), plan_change_input.is_begun) == ({ENTRY}, False)

    run(scenario)


def test_nodes_of_the_ring_that_leave_are_awaited_while_they_are_there_and_respond() -> None:
    async def scenario() -> None:
        place, other = Place(), NodeId(b"o" * 32)

        def leaving() -> set[NodeId]:
            return set(place.member.plan_change_input(LATER, 0.5).leaving)

        place.serve()
        place.states |= {ENTRY: loaded(), STAGE: loaded(), other: loaded()}
        place.alive.add(other)
        assert leaving() == set()
        place.member.agreement = replace(AGREEMENT, leaving=frozenset({STAGE, other}))
        assert leaving() == {STAGE}
        place.states[STAGE] = replace(loaded(), obstacle="its compute thread hangs")
        assert leaving() == set()
        place.states[STAGE] = loaded()
        place.alive.discard(STAGE)
        assert leaving() == set()

    run(scenario)


def test_a_lost_node_without_which_there_is_no_plan_may_come_back_unless_it_is_removed() -> None:
    async def scenario() -> None:
        place, alone = Place(), frozenset({ENTRY})
        nothing = replace(AGREEMENT, plan=None, alive=alone, offers=AGREEMENT.offers[:1])
        assert [each.node for each in nothing.offers] == [ENTRY]
        place.machine.profiles = dict.fromkeys((ENTRY, STAGE))
        place.alive.discard(STAGE)
        waits = place.member.waits_for_lost
        assert not waits(nothing)  # nothing is followed
        place.serve()

        assert waits(nothing)
        assert not waits(replace(nothing, plan=LATER))
        assert not waits(replace(nothing, alive=AGREEMENT.alive, offers=AGREEMENT.offers))
        assert not waits(replace(nothing, offers=()))  # the other one hangs
        place.states[STAGE] = StateRecord(Lifecycle.LEFT)
        assert not waits(nothing)
        del place.states[STAGE]
        place.alive.add(STAGE)
        place.states[STAGE] = loaded()
        assert waits(nothing)  # it has just come back
        place.states[STAGE] = replace(loaded(), group=several()[1])
        assert not waits(nothing)  # it is in another ring
        place.alive.discard(STAGE)
        del place.machine.profiles[STAGE]
        assert not waits(nothing)

    run(scenario)


def test_a_span_loaded_for_the_last_plan_does_not_count_for_the_next() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve(ALONE)
        place.member.loaded(True, None)
        place.serve(PLAN)  # published before the runtime begins to load
        assert [(state.followed, state.is_loaded) for state in place.told] == [
            (ALONE.encode(), False), (ALONE.encode(), True), (PLAN.encode(), False),
        ]  # fmt: skip

    run(scenario)


def test_the_reason_why_the_ring_does_not_serve_is_reported() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.profiles |= {ENTRY: SimpleNamespace(name="a"), STAGE: SimpleNamespace(name="b")}
        assert place.member.reason == "0 of 2 nodes have loaded their layers; loading: a, b"
        place.states[ENTRY] = loaded()
        assert place.member.reason == "1 of 2 nodes have loaded their layers; loading: b"
        place.states[STAGE] = loaded()
        assert place.member.reason == "2 of 2 nodes have loaded their layers and connect"
        place.runtime.missing = STAGE
        assert place.member.reason.endswith("; no link to b")
        place.profiles.clear()
        place.alive.remove(STAGE)
        assert place.member.reason == f"{short(PLAN.stages[1].node)} is gone"
        place.alive.remove(ENTRY)
        place.profiles |= {ENTRY: SimpleNamespace(name="a"), STAGE: SimpleNamespace(name="b")}
        assert place.member.reason == "a, b are gone"

    run(scenario)


def test_an_error_is_the_reason() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        assert place.member.reason.startswith("0 of 2 nodes have loaded their layers")
        place.member.loaded(False, ModelError("no memory"))
        assert place.member.reason == "no memory"

    run(scenario)


def test_the_node_is_told_of_each_span_that_cannot_be_loaded() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.member.loaded(False, None)
        assert (place.failed, len(place.told)) == (0, 1)
        place.member.loaded(False, ModelError("no memory"))
        assert (place.failed, len(place.told)) == (1, 1)  # the state record is the same

    run(scenario)


def test_another_entry_is_known_when_all_have_loaded_and_it_is_linked() -> None:
    async def scenario() -> None:
        place = Place(STAGE)
        place.serve()
        place.states[STAGE] = loaded()
        place.states[ENTRY] = StateRecord(Lifecycle.SERVING, followed=b"another", is_loaded=True)
        place.links.by_peer[ENTRY] = object()
        assert place.member.serving_entry() is None
        place.states[ENTRY] = loaded()
        assert place.member.serving_entry() == ENTRY
        del place.states[STAGE]
        assert place.member.serving_entry() is None
        place.states[STAGE] = loaded()
        place.links.by_peer.clear()
        assert place.member.serving_entry() is None

    run(scenario)


def test_the_runtime_is_notified_when_all_have_loaded() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        for node in (ENTRY, STAGE):
            assert not any(place.formed)
            place.states[node] = loaded()
            place.own.publish()
        assert place.formed[-1]
        assert await place.member.dial(C) == C  # type: ignore[comparison-overlap]  # a fake

    run(scenario)


def test_times_of_ranks_follow_from_the_latest_offers() -> None:
    place = Place()
    unknown = place.member.times(PLAN)
    place.member.agreement = AGREEMENT
    without_charter = place.member.times(PLAN)
    place.machine.charter = charter()

    times = place.member.times(PLAN)

    slow = [replace(each, layer_s=((1, 9.0),)) for each in AGREEMENT.offers]
    place.member.agreement = replace(AGREEMENT, offers=tuple(slow))
    slower = place.member.times(PLAN)
    place.member.agreement = replace(AGREEMENT, offers=AGREEMENT.offers[:1])
    gone = place.member.times(PLAN)
    assert times == ring_times(PLAN, AGREEMENT.offers, AGREEMENT.links, charter().shape)
    assert slower is not None
    assert [rank.offer for rank in slower.ranks] == slow
    assert (unknown, without_charter, gone) == (None, None, None)


def test_begin_creates_a_runtime() -> None:
    async def scenario() -> None:
        place = Place()
        model: Any = SimpleNamespace()
        runtime = place.member.begin(model)
        assert (place.member.runtime, place.member.model) == (runtime, model)
        assert runtime.plan is None

    run(scenario)


def test_rows_are_counted_by_the_cause_of_the_loss_before_them() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.work()
        place.runtime.recomputed = 5  # of the first ring: before any loss
        place.replaced = PLAN
        place.work()
        place.runtime.recomputed, place.replaced = 8, None
        place.work()  # it is the same ring
        assert place.own.recomputed == {LossCause.REPLANNED: 5, LossCause.LINK_LOST: 3}
        place.runtime.recomputed, place.runtime.plan = 9, LATER
        place.alive.discard(STAGE)
        place.replaced = PLAN
        place.work()
        place.runtime.recomputed = 20
        assert place.own.recomputed == {
            LossCause.REPLANNED: 5, LossCause.LINK_LOST: 4, LossCause.NODE_LOST: 11,
        }  # fmt: skip

    run(scenario)
