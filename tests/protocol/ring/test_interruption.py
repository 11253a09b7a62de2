import pytest

from meshllm.names import LossCause, NodeId, Span
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.ring.interruption import explain
from tests.builders.offers import A, B, C, D

NAMES = {A: "attic", B: "bench", C: "cellar", D: "door"}


def ring(*stages: tuple[NodeId, int, int], epoch: int = 1) -> Plan:
    return Plan(epoch, "tiny", Ends.ENTRY, tuple(PlanStage(at, Span(a, b)) for at, a, b in stages))


BEFORE = ring((A, 0, 4), (B, 4, 8), (C, 8, 12))


@pytest.mark.parametrize(
    ("after", "alive", "out", "cause", "text"),
    [
        (BEFORE, {A, B, C}, {}, LossCause.LINK_LOST, "a link was lost for a moment"),
        (None, {A, B, C}, {}, LossCause.LINK_LOST, "a link was lost for a moment"),
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
    told = explain(BEFORE, after, alive=alive, out=out, name=NAMES.__getitem__)

    assert told == (cause, text)


def test_without_a_plan_before_only_a_link_was_lost() -> None:
    told = explain(None, BEFORE, alive={A}, out={}, name=NAMES.__getitem__)

    assert told == (LossCause.LINK_LOST, "a link was lost for a moment")
