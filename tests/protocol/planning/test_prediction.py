from dataclasses import replace

import pytest

from meshllm.names import Span
from meshllm.protocol.drafting.window import DRAFTS
from meshllm.protocol.planning.chunking import ring_times
from meshllm.protocol.planning.plan import (
    MAX_SECONDS,
    Ends,
    Links,
    LinkSpeed,
    Plan,
    PlanConstraints,
    PlanStage,
)
from meshllm.protocol.planning.policies import POLICIES
from meshllm.protocol.planning.prediction import compare, predict
from tests.builders.offers import A, B, C, apart, model, offer

PAIR = Plan(1, "tiny", Ends.ENTRY, (PlanStage(A, Span(0, 3)), PlanStage(B, Span(3, 4))))
ALONE = Plan(1, "tiny", Ends.ENTRY, (PlanStage(A, Span(0, 4)),))
OFFERS = [offer(A, 4, ms=2, head_ms=5), offer(B, 4, ms=3)]


def test_a_token_takes_every_layer_every_hop_and_the_head() -> None:
    prediction = predict(PAIR, OFFERS, apart({}, others=10), model(4))

    assert [hop.compute_s for hop in prediction.hops] == pytest.approx([0.006, 0.003])
    assert [hop.wire_s for hop in prediction.hops] == [0.010, 0.010]
    assert prediction.seconds_per_token == pytest.approx(0.034)
    assert prediction.slowest_stage_s == pytest.approx(0.011)


def test_a_ring_of_one_has_no_wire() -> None:
    prediction = predict(ALONE, OFFERS, apart({}, others=10), model(4))

    assert prediction.seconds_per_token == pytest.approx(0.013)
    assert prediction.ttft_s == pytest.approx(0.005 + 4 * 0.020)


def test_a_hop_over_an_unmeasured_link_is_not_measured() -> None:
    links = Links({}, LinkSpeed(MAX_SECONDS))

    assert not predict(PAIR, OFFERS, links, model(4)).is_measured
    assert predict(PAIR, OFFERS, apart({}, others=10), model(4)).is_measured
    assert predict(ALONE, OFFERS, links, model(4)).is_measured


def test_layers_take_time_in_proportion_to_their_weights() -> None:
    prediction = predict(PAIR, OFFERS, Links(), model(sizes=(80, 80, 80, 160)))

    assert [hop.compute_s for hop in prediction.hops] == pytest.approx(
        [3 * 0.8 * 0.002, 1.6 * 0.003]
    )


def test_bytes_of_a_hop_match_its_message() -> None:
    prediction = predict(PAIR, OFFERS, Links({}, LinkSpeed(0.0, 1000.0)), model(4))

    bytes_per_token = ring_times(PAIR, OFFERS, Links(), model(4)).message_bytes(1)
    assert [hop.bytes_per_token for hop in prediction.hops] == [bytes_per_token] * 2
    assert prediction.hops[0].wire_s == bytes_per_token / 1000


def test_a_prompt_is_sent_in_the_best_chunks() -> None:
    links = apart({}, others=10)
    times = ring_times(PAIR, OFFERS, links, model(4))

    prediction = predict(PAIR, OFFERS, links, model(4), prompt_tokens=5000)

    pace = times.best_pace(5000)
    assert prediction.chunk == pace.chunk < 5000
    assert prediction.ttft_s == times.first_token_s(5000, pace)


def test_draft_tokens_share_a_trip() -> None:
    # One trip takes 34 ms, and 2 % more for each draft in the layers and the head.
    prediction = predict(PAIR, OFFERS, apart({}, others=10), model(4))

    assert [drafts for drafts, _ in prediction.steps] == list(DRAFTS)
    one, two = (seconds for _, seconds in prediction.steps[:2])
    assert one == pytest.approx(prediction.seconds_per_token)
    assert two == pytest.approx(0.020 + 0.014 * (1 + 9 / 255))


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.0, 0), (0.5, 4), (1.0, 16)])
def test_the_best_draft_length_depends_on_the_acceptance(acceptance: float, drafts: int) -> None:
    prediction = predict(PAIR, OFFERS, apart({}, others=10), model(4))

    with_drafts = prediction.with_drafts(acceptance)

    tokens = sum(acceptance**power for power in range(drafts + 1))
    assert with_drafts.drafts == drafts
    assert with_drafts.seconds_per_token == pytest.approx(dict(prediction.steps)[drafts] / tokens)


def test_no_drafts_if_rows_are_computed_one_by_one() -> None:
    offers = [replace(each, layer_s=((1, 1e-3), (32, 32e-3))) for each in OFFERS]

    prediction = predict(PAIR, offers, Links(), model(4))

    assert prediction.with_drafts(0.9).drafts == 0
    assert prediction.with_drafts(0.9).seconds_per_token == prediction.seconds_per_token


def test_a_client_computes_the_head_only() -> None:
    stages = (PlanStage(A, Span(0, 0)), PlanStage(B, Span(0, 4)))
    plan = Plan(1, "tiny", Ends.CLIENT, stages)

    prediction = predict(plan, OFFERS, Links(), model(4))

    assert [hop.compute_s for hop in prediction.hops] == pytest.approx([0.0, 0.012])
    assert [prediction.head_s, prediction.slowest_stage_s] == pytest.approx([0.005, 0.012])


def test_policies_are_compared_with_the_default() -> None:
    offers = [offer(A, 4, ms=1), offer(B, 4, ms=1)]

    found = compare(offers, apart({}, others=4), model(4))
    by_policy = {each.policy: each for each in found}
    auto, fastest, throughput, proportional = (
        by_policy[name] for name in ("auto", "fastest", "throughput", "proportional")
    )

    assert auto.reason == "4.0 ms per token, 4.0 ms in the slowest stage"
    assert fastest.plan == auto.plan
    assert throughput.reason == (
        "12.0 ms per token, 2.0 ms in the slowest stage: 3.00 and 0.50 times those of `auto`"
    )
    assert proportional.plan == throughput.plan
    assert [*by_policy] == [*POLICIES]


def test_a_policy_without_a_ring_has_a_reason() -> None:
    terms = PlanConstraints(spans={C: Span(0, 4)})

    found = {each.policy: each for each in compare([offer(C, 4)], Links(), model(4), terms=terms)}
    proportional = found.pop("proportional")

    takes_spans = [name for name in found if POLICIES[name].takes_spans]
    assert all(found[name].plan is not None for name in takes_spans)
    assert (proportional.plan, proportional.prediction) == (None, None)
    assert proportional.reason == "Policy `proportional` does not support fixed spans"


def test_no_comparison_without_a_default_plan() -> None:
    assert {alternative.plan for alternative in compare([], Links(), model(4))} == {None}
