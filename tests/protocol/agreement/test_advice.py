from dataclasses import replace

from meshllm.names import Span, short
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from tests.builders.offers import A, B, C
from tests.builders.snapshots import World, charter, profile, weights

SLOW = Plan(5, "tiny", Ends.ENTRY, (PlanStage(A, Span(0, 4)),))


def test_without_a_ring_it_says_why() -> None:
    advice = advise(World({A: profile(1)}).agree())

    assert advice.startswith("There is no ring: The ring lacks")


def test_there_is_no_advice_while_no_node_is_ready() -> None:
    assert not advise(World({A: replace(profile(1), weights=())}).agree())


def test_a_waiting_ring_is_named() -> None:
    world = World({A: profile(4), B: profile(4, ms=0.5)}, followed={A: SLOW}, busy={A})

    assert advise(world.agree()) == (
        "A ring that takes 2.0 instead of 4.0 ms per token is pending until running sessions end"
    )


def test_a_constraint_that_costs_time_is_named() -> None:
    agreed = replace(charter(), policy="proportional", members=2)

    advice = advise(World({A: profile(4), B: profile(4, ms=3.0)}, agreed).agree())

    assert advice == (
        "Without `--policy proportional` and `--members 2` the ring would take 4.0 instead of"
        " 9.0 ms per token"
    )


def test_a_constraint_that_costs_nothing_is_not_named() -> None:
    agreed = replace(charter(), exclude=(B,), prefer=(A,))

    advice = advise(World({A: profile(4), B: profile(4)}, agreed).agree())

    assert "computes 4.0 of 4.0 ms per token in layers `0:4`" in advice


def test_a_constraint_without_an_alternative_is_not_named() -> None:
    agreed = replace(charter(), members=1)
    world = World({A: profile(4), B: profile(4, span=Span(1, 3))}, agreed)

    assert "computes 4.0 of 4.0 ms" in advise(world.agree())


def test_high_network_latency_is_named() -> None:
    far = {frozenset({A, B}): 8.2, frozenset({A, C}): 800.0, frozenset({B, C}): 800.0}

    advice = advise(World({A: profile(2), B: profile(2)}, apart_ms=far).agree())

    assert advice == (
        "67% of the time per token is network latency, most of it 4.1 ms from"
        f" `{short(A)}` to `{short(B)}`: fewer nodes with more memory each, or nodes closer"
        " together, would help"
    )


def test_a_refused_node_is_named() -> None:
    other = replace(profile(4), weights=weights(changed={0: b"x" * 16}))

    advice = advise(World({A: profile(4), B: other}).agree())

    assert advice.startswith(f"`{short(B)}` could take layers, but is refused: its layer 0")


def test_otherwise_the_slowest_node_is_named() -> None:
    advice = advise(World({A: profile(3), B: profile(1, ms=9.0)}).agree())

    assert advice.startswith(f"`{short(B)}` computes 9.0 of 13.0 ms per token in layers `3:4`")
