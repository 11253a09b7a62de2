import pytest

from meshllm.names import SessionId, Span
from meshllm.protocol.blob import seal, session_key
from meshllm.protocol.codec import encode
from meshllm.protocol.messages import Data, DType, Flags
from meshllm.protocol.plan import Ends, Links, Plan, Policy, Stage, Terms, Wire
from meshllm.protocol.prediction import CHUNK, compare, predict
from tests.protocol.nodes import A, B, C, apart, model, offer

PAIR = Plan(1, "tiny", Ends.ENTRY, (Stage(A, Span(0, 3)), Stage(B, Span(3, 4))))
ALONE = Plan(1, "tiny", Ends.ENTRY, (Stage(A, Span(0, 4)),))
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


def test_layers_take_time_in_proportion_to_their_weights() -> None:
    prediction = predict(PAIR, OFFERS, Links(), model(sizes=(80, 80, 80, 160)))

    assert [hop.compute_s for hop in prediction.hops] == pytest.approx(
        [3 * 0.8 * 0.002, 1.6 * 0.003]
    )


def test_bytes_of_a_hop_are_those_of_its_message() -> None:
    session = SessionId(b"s" * 16)
    blob = seal(session_key(session), DType.BFLOAT16, (1, 1, 4), bytes(8))
    parts = encode(Data(session, 1, 0, 9, 1, Flags.NEED_ROW, blob))

    prediction = predict(PAIR, OFFERS, Links({}, Wire(0.0, 1000.0)), model(4))

    assert [hop.bytes_per_token for hop in prediction.hops] == [sum(map(len, parts))] * 2
    assert prediction.hops[0].wire_s == sum(map(len, parts)) / 1000


def test_ranks_work_on_different_chunks_of_a_prompt() -> None:
    # Per chunk: 3 x 20 ms on the entry, 30 ms on the other, which waits for the entry.
    one, four = (
        predict(PAIR, OFFERS, apart({}, others=10), model(4), prompt_tokens=count * CHUNK).ttft_s
        for count in (1, 4)
    )

    assert one == pytest.approx(0.060 + 0.010 + 0.030 + 0.010 + 0.005)
    assert four == pytest.approx(one + 3 * 0.060)


def test_the_rest_of_a_prompt_is_a_short_chunk() -> None:
    whole, more = (
        predict(ALONE, OFFERS, Links(), model(4), prompt_tokens=tokens).ttft_s
        for tokens in (CHUNK, CHUNK + 1)
    )

    assert more == pytest.approx(whole + 4 * 0.002)


def test_a_client_computes_the_head_only() -> None:
    stages = (Stage(A, Span(0, 0)), Stage(B, Span(0, 4)))
    plan = Plan(1, "tiny", Ends.CLIENT, stages)

    prediction = predict(plan, OFFERS, Links(), model(4))

    assert [hop.compute_s for hop in prediction.hops] == pytest.approx([0.0, 0.012])
    assert [prediction.head_s, prediction.slowest_stage_s] == pytest.approx([0.005, 0.012])


def test_policies_are_compared_with_fastest() -> None:
    offers = [offer(A, 4, ms=1), offer(B, 4, ms=1)]

    fastest, throughput, proportional = compare(offers, apart({}, others=4), model(4))

    assert fastest.reason == "4.0 ms per token, 4.0 ms in the slowest stage"
    assert throughput.reason == (
        "12.0 ms per token, 2.0 ms in the slowest stage: 3.00 and 0.50 times those of `fastest`"
    )
    assert proportional.plan == throughput.plan
    assert [found.policy for found in (fastest, throughput, proportional)] == [
        Policy.FASTEST,
        Policy.THROUGHPUT,
        Policy.PROPORTIONAL,
    ]


def test_a_policy_without_a_ring_says_why() -> None:
    terms = Terms(spans={C: Span(0, 4)})

    *found, proportional = compare([offer(C, 4)], Links(), model(4), terms=terms)

    assert all(alternative.plan is not None for alternative in found)
    assert (proportional.plan, proportional.prediction) == (None, None)
    assert proportional.reason == "`proportional` takes no bound spans"


def test_where_fastest_has_no_ring_nobody_is_compared_with_it() -> None:
    assert {alternative.plan for alternative in compare([], Links(), model(4))} == {None}
