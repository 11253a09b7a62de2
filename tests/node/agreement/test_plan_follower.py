"""When a node looks again at a plan that settles."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.names import Span
from meshllm.node.agreement.plan_follower import (
    END_S,
    GATHER_S,
    KEEP_S,
    LOST_S,
    SETTLE_S,
    PlanFollower,
)
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.ring.plan_change import PlanChangeInput, PlanChangeState
from tests.builders.offers import A

PLANS = [Plan(epoch, "toy", Ends.ENTRY, (PlanStage(A, Span(0, 4)),)) for epoch in range(1, 4)]


class SettlingNode:
    """A follower whose plan is set, on a clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.followed = 100.0, list[Plan | None]()
        self.timers = list[tuple[float, Callable[[], None]]]()
        self.agreement = SimpleNamespace(plan=None, lacking=0, has_lost=lambda _: False)
        self.planner = SimpleNamespace(agreement=self.agreement)
        self.has_sessions, self.looks = False, list[PlanChangeInput]()
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: SimpleNamespace(time=self._time))
        self.member = member = SimpleNamespace(
            runtime=SimpleNamespace(follow=self.followed.append),
            plan=None,
            plan_change_input=self._outlook,
            waits_for_lost=lambda _: False,
        )
        self.follower = PlanFollower(
            cast("Any", member),
            cast("Any", SimpleNamespace(publish=lambda: None)),
            cast("Any", self.planner),
            lambda: self.has_sessions,
            cast("Any", self._call_later),
        )

    def agree(self, plan: Plan | None) -> None:
        self.agreement.plan = plan
        self.follower.look()

    def fire(self, now: float) -> None:
        """Fire the timers that are set, at a time."""
        self.now, timers, self.timers = now, self.timers, []
        for _, call in timers:
            call()

    def _time(self) -> float:
        return self.now

    def _outlook(self, plan: Plan | None, settle_s: float) -> PlanChangeInput:
        self.looks.append(PlanChangeInput(plan, None, settle_s))
        return self.looks[-1]

    def _call_later(self, delay_s: float, callback: Callable[..., None], /, *args: Any) -> None:
        self.timers.append((self.now + delay_s, lambda: callback(*args)))


def test_a_timer_that_fires_early_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SettlingNode(monkeypatch)
    node.agree(PLANS[0])
    assert node.follower.progress is PlanChangeState.SETTLING

    node.fire(100.0 + SETTLE_S - 1e-9)
    assert node.followed == []
    node.fire(100.0 + SETTLE_S)

    assert node.followed == [PLANS[0]]
    assert node.timers == []


def test_plans_that_keep_changing_leave_one_live_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SettlingNode(monkeypatch)
    for number, plan in enumerate(PLANS):
        node.now = 100.0 + number * SETTLE_S / 4
        node.agree(plan)

    node.fire(100.0 + SETTLE_S)  # those of the earlier plans have come, too
    assert len(node.timers) == 1
    node.fire(100.0 + 2 * SETTLE_S)

    assert node.followed == [PLANS[-1]]
    assert node.timers == []


def test_how_long_a_plan_settles_depends_on_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = SettlingNode(monkeypatch)

    node.agree(PLANS[0])
    node.agreement.has_lost = lambda _: True
    node.agree(PLANS[0])
    node.member.waits_for_lost = lambda _: True
    node.agree(None)
    node.agreement.lacking = 1
    node.agree(PLANS[0])
    node.planner.agreement = None  # the model is served no more
    node.follower.look()
    node.has_sessions = True
    node.follower.look()

    waited = [SETTLE_S, LOST_S, KEEP_S, GATHER_S, SETTLE_S, END_S]
    assert [each.settle_s for each in node.looks] == waited
