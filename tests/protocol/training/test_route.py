from meshllm.names import Span
from meshllm.protocol.training.route import holder
from tests.builders.rank_plans import plan_of


def test_the_node_with_all_layers_of_a_span_takes_its_batches() -> None:
    plan = plan_of("0:4", "4:9")
    first, second = (each.node for each in plan.stages)

    found = [holder(plan, each) for each in (Span(0, 4), Span(1, 2), Span(4, 9), Span(8, 9))]

    assert found == [first, first, second, second]


def test_no_node_takes_a_span_that_is_cut_or_beyond_the_model() -> None:
    plan = plan_of("0:4", "4:9")

    assert {holder(plan, each) for each in (Span(0, 5), Span(3, 9), Span(8, 10), Span(9, 10))} == {
        None
    }
