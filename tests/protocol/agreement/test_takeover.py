"""The plan that waits, or the loss that a standby prepares for."""

from dataclasses import replace

from meshllm.names import NodeId, Span
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.takeover import takeover
from meshllm.protocol.planning.plan import Plan
from tests.builders.offers import A, B, C
from tests.builders.snapshots import World, charter, profile


def span_of(plan: Plan, node: NodeId) -> Span:
    rank = plan.rank(node)
    assert rank is not None
    return plan.stages[rank].span


def ring_of_two(c_layers: float = 4.0) -> tuple[World, Agreement, NodeId, NodeId]:
    """Let A and B form a ring in which one holds more; C is a standby."""
    profiles = {A: profile(3.9), B: profile(1.9), C: profile(c_layers, ms=50.0)}
    world = World(profiles, replace(charter(), members=2))
    agreement = world.agree(C)
    assert agreement.plan is not None
    one, other = sorted(
        (stage.node for stage in agreement.plan.stages),
        key=lambda node: -len(span_of(agreement.plan, node)),  # type: ignore[arg-type]  # as above
    )
    return world, agreement, one, other


def test_a_standby_prepares_for_the_loss_that_makes_it_load_most() -> None:
    _, agreement, big, small = ring_of_two()
    assert agreement.plan is not None
    assert agreement.plan.rank(C) is None
    assert len(span_of(agreement.plan, big)) > len(span_of(agreement.plan, small))

    after = takeover(agreement)

    assert after is not None
    assert after.rank(C) is not None
    assert after.rank(big) is None


def test_it_is_what_the_others_would_agree_on() -> None:
    world, agreement, big, _ = ring_of_two()
    followed = world.follow(agreement)

    after = takeover(followed.agree(C))

    gone = replace(followed, gone=(big,)).agree(C).plan
    assert after is not None
    assert gone is not None
    assert span_of(after, C) == span_of(gone, C)


def test_a_node_of_the_ring_prepares_for_nothing() -> None:
    world, agreement, big, _ = ring_of_two()

    assert takeover(agreement) is not None
    assert takeover(world.agree(big)) is None


def test_a_standby_that_can_take_nothing_over_prepares_for_nothing() -> None:
    _, agreement, _, _ = ring_of_two(c_layers=0.01)

    assert agreement.plan is not None
    assert takeover(agreement) is None


def test_a_plan_that_waits_comes_first() -> None:
    world, agreement, big, _ = ring_of_two()
    after = agreement.plan

    assert takeover(replace(agreement, ahead=after)) == after
    assert takeover(replace(world.agree(big), ahead=after)) == after


def test_without_a_ring_there_is_nothing_to_prepare_for() -> None:
    world = World({A: profile(1.0), C: profile(1.0)})

    assert takeover(world.agree(C)) is None
