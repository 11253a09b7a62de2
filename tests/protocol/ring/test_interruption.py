import pytest

from meshllm.names import FIRST_GROUP, GroupId, LossCause, NodeId, Span
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.ring.interruption import RecomputedRows, explain
from tests.builders.offers import A, B, C, D

NAMES = {A: "attic", B: "bench", C: "cellar", D: "door"}


def ring(*stages: tuple[NodeId, int, int], epoch: int = 1) -> Plan:
    return Plan(epoch, "tiny", Ends.ENTRY, tuple(PlanStage(at, Span(a, b)) for at, a, b in stages))


BEFORE = ring((A, 0, 4), (B, 4, 8), (C, 8, 12))


@pytest.mark.parametrize(
    ("after", "alive", "out", "cause", "text"),
    [
        (BEFORE, {A, B, C}, {}, LossCause.LINK_LOST, "a link was lost for a moment"),
        (None, {A, B, C}, {}, LossCause.LINK_LOST, "a link was lost"),
        (None, {A, C}, {}, LossCause.NODE_LOST, "bench is gone"),
        (
            ring((A, 0, 8), (C, 8, 12), epoch=2), {A, C}, {}, LossCause.NODE_LOST,
            "bench is gone; attic takes layers 4:8",
        ),
        (
            ring((A, 0, 6), (C, 6, 12), epoch=2), {A, B, C}, {LossCause.NODE_LEFT: {B}},
            LossCause.NODE_LEFT,
            "bench left; attic takes layers 4:6; cellar takes layers 6:8",
        ),
        (
            ring((A, 0, 8), (C, 8, 12), epoch=2), {A, C}, {LossCause.NODE_SILENT: {B, D}},
            LossCause.NODE_SILENT, "bench is silent; attic takes layers 4:8",
        ),
        (
            ring((A, 0, 8), (C, 8, 12), epoch=2), {A, C},
            {LossCause.NODE_SILENT: {B}, LossCause.NODE_LEFT: {B}},
            LossCause.NODE_LEFT, "bench left; attic takes layers 4:8",
        ),
        (
            ring((D, 0, 12), epoch=2), {D}, {LossCause.NODE_LEFT: {B}}, LossCause.NODE_LOST,
            "attic is gone, cellar is gone, bench left; door takes layers 0:12",
        ),
        (
            ring((A, 0, 8), (C, 8, 12), epoch=2), {A, B, C},
            {LossCause.NODE_HUNG: {B}, LossCause.NODE_REFUSED: {B}, LossCause.NODE_LEFT: {D}},
            LossCause.NODE_HUNG, "bench hangs; attic takes layers 4:8",
        ),
        (
            ring((A, 0, 8), (D, 8, 12), epoch=2), {A, B, C, D},
            {LossCause.NODE_REFUSED: {B}, LossCause.NODE_LEFT: {C}}, LossCause.NODE_REFUSED,
            "bench is refused, cellar left; attic takes layers 4:8; door takes layers 8:12",
        ),
        (
            ring((B, 0, 12), epoch=2), {A, B, C}, {}, LossCause.REPLANNED,
            "the ring has a new plan; bench takes layers 0:4; bench takes layers 8:12",
        ),
        (
            ring((C, 0, 4), (B, 4, 8), (A, 8, 12), epoch=2), {A, B, C}, {}, LossCause.REPLANNED,
            "the ring has a new plan; cellar takes layers 0:4; attic takes layers 8:12",
        ),
    ],
)  # fmt: skip
def test_the_phrase_says_who_is_away_and_who_took_over(
    after: Plan | None,
    alive: set[NodeId],
    out: dict[LossCause, set[NodeId]],
    cause: LossCause,
    text: str,
) -> None:
    told = explain(
        (FIRST_GROUP, BEFORE),
        (FIRST_GROUP, after) if after else None,
        alive=alive,
        out=out,
        name=NAMES.__getitem__,
    )

    assert told == (cause, text)


def test_without_a_plan_before_only_a_link_was_lost() -> None:
    told = explain(None, (FIRST_GROUP, BEFORE), alive={A}, out={}, name=NAMES.__getitem__)

    assert told == (LossCause.LINK_LOST, "a link was lost for a moment")


@pytest.mark.parametrize(
    ("alive", "cause", "text"),
    [
        ({A, B, D}, LossCause.NODE_LOST, "cellar is gone; another ring goes on"),
        ({A, B, C, D}, LossCause.LINK_LOST, "a link was lost; another ring goes on"),
    ],
)
def test_a_replica_that_goes_on_takes_no_layers_over(
    alive: set[NodeId], cause: LossCause, text: str
) -> None:
    other = GroupId(b"replica"), ring((D, 0, 12))

    told = explain((FIRST_GROUP, BEFORE), other, alive=alive, out={}, name=NAMES.__getitem__)

    assert told == (cause, text)


def test_rows_are_counted_under_the_loss_before_them() -> None:
    rows = RecomputedRows()

    rows.lost(LossCause.NODE_LOST, 0)
    first = rows.count(30)
    rows.lost(LossCause.LINK_LOST, 40)
    blink = rows.count(40)
    rows.lost(LossCause.NODE_LOST, 45)
    rows.end(50)  # another runtime counts from 0
    last = rows.count(7)

    assert first == {LossCause.NODE_LOST: 30}
    assert blink == {LossCause.NODE_LOST: 40}
    assert last == {LossCause.NODE_LOST: 52, LossCause.LINK_LOST: 5}
