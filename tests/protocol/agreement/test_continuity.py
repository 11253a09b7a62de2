"""Plans after a loss in which the nodes that stay keep their layers."""

import pytest

from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.continuity import MAX_SPARE, MAX_TRIED, continuations
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from tests.builders.offers import A, B, C, D, node

E = node(5)


def plan_of(*stages: tuple[NodeId, str], ends: Ends = Ends.ENTRY) -> Plan:
    parts = tuple(PlanStage(at, Span.parse(span)) for at, span in stages)
    return Plan(1, "tiny", ends, parts)


def spans_of(plan: Plan, staying: set[NodeId], *spare: NodeId) -> list[str]:
    names = {A: "A", B: "B", C: "C", D: "D", E: "E"}
    return [
        " ".join(f"{names[stage.node]}{stage.span}" for stage in stages)
        for stages in continuations(plan, staying, spare)
    ]


THREE = plan_of((A, "0:4"), (B, "4:8"), (C, "8:12"))


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        (A, ["B0:8 C8:12", "D0:4 B4:8 C8:12"]),
        (
            B,
            [
                *("A0:8 C8:12", "A0:4 C4:12", "A0:4 D4:8 C8:12"),
                *("A0:5 C5:12", "A0:6 C6:12", "A0:7 C7:12"),
            ],
        ),
        (C, ["A0:4 B4:12", "A0:4 B4:8 D8:12"]),
    ],
)
def test_a_neighbour_or_a_spare_node_or_both_neighbours_take_what_is_lost(
    lost: NodeId, found: list[str]
) -> None:
    assert spans_of(THREE, {A, B, C} - {lost}, D) == found


def test_neighbours_that_are_lost_together_leave_one_gap() -> None:
    assert spans_of(THREE, {A}, D) == ["A0:12", "A0:4 D4:12"]
    assert spans_of(THREE, {B}) == ["B0:12"]


def test_no_node_takes_two_gaps_around_another() -> None:
    four = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"), (D, "6:8"))

    found = spans_of(four, {B, D}, E)

    assert found == [
        *("B0:6 D6:8", "B0:4 D4:8", "B0:4 E4:6 D6:8", "B0:5 D5:8"),
        *("E0:2 B2:6 D6:8", "E0:2 B2:4 D4:8", "E0:2 B2:5 D5:8"),
    ]


@pytest.mark.parametrize(
    ("layers", "cuts"), [(1, []), (2, [5]), (3, [5, 6]), (5, [5, 6, 7]), (40, [14, 24, 34])]
)
def test_a_gap_is_divided_at_a_few_layers(layers: int, cuts: list[int]) -> None:
    stop = 4 + layers
    three = plan_of((A, "0:4"), (B, f"4:{stop}"), (C, f"{stop}:64"))

    divided = [f"A0:{cut} C{cut}:64" for cut in cuts]
    assert spans_of(three, {A, C}) == [f"A0:{stop} C{stop}:64", "A0:4 C4:64", *divided]


def test_an_entry_without_layers_gets_none() -> None:
    client = plan_of((A, "0:0"), (B, "0:4"), (C, "4:8"), ends=Ends.CLIENT)

    assert spans_of(client, {A, C}) == ["A0:0 C0:8"]


@pytest.mark.parametrize("staying", [set[NodeId](), {A, B, C}])
def test_without_a_loss_or_survivors_there_is_none(staying: set[NodeId]) -> None:
    assert spans_of(THREE, staying, D) == []


def test_each_of_several_gaps_may_go_to_both_sides() -> None:
    seven = plan_of(*((node(200 + at), f"{4 * at}:{4 * at + 4}") for at in range(7)))
    staying = {stage.node for stage in seven.stages[::2]}
    spare = [node(100 + number) for number in range(MAX_SPARE)]

    plans = [*continuations(seven, staying, spare)]

    assert len(plans) <= MAX_TRIED
    heirs = {(stage.node, layer) for plan in plans for stage in plan for layer in layers_of(stage)}
    for gap in (1, 3, 5):
        whole = range(4 * gap, 4 * gap + 4)
        assert heirs >= {(node(200 + gap + side), layer) for side in (-1, 1) for layer in whole}


def layers_of(stage: PlanStage) -> range:
    return range(stage.span.start, stage.span.stop)


def test_few_plans_are_tried() -> None:
    spare = [node(100 + number) for number in range(10)]
    assert len([*continuations(THREE, {A, B}, spare)]) == 1 + MAX_SPARE

    long = plan_of(*((node(200 + at), f"{at}:{at + 1}") for at in range(16)))
    odd = {stage.node for stage in long.stages[1::2]}
    assert len([*continuations(long, odd, spare)]) <= MAX_TRIED
