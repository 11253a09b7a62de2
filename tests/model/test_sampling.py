"""The sampler: equal to transformers, exactly distributed, and reproducible everywhere."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from meshllm.errors import ModelError
from meshllm.model import sampling as module
from meshllm.model.sampling import logprobs, noise_of, sample_token, validate
from meshllm.request import NEVER, Sampling
from meshllm.strict_json import WrongField
from tests.builders.plain_sampling import sample_plainly

# Critical values of chi-square at 0.001 (NIST/SEMATECH e-Handbook, 1.3.6.7.4).
CHI_SQUARE = {4: 18.467, 7: 24.322, 15: 37.697}
GOLDEN_NOISE = [2.9565408870665038, 2.062718511741289, 1.5721653138465512, -0.9952962571979324]
GOLDEN_PLAIN = [393, 538, 393, 393, 393, 337, 337, 452, 909, 337, 393, 909]
GOLDEN_NARROW = [393, 538, 393, 393, 393, 337, 337, 452, 337, 337, 393, 393]
SKEWED = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])


def some_logits(seed: int, size: int = 1000) -> Tensor:
    """Return random logits [V], fp32, a quarter of them rounded so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) * 3
    logits[: size // 4] = logits[: size // 4].round()
    return logits


def warped(logits: Tensor, sampling: Sampling, history: list[int]) -> Tensor:
    scores = logits.clone()
    module._penalise(scores, sampling, history, 0)
    kept = module._warp(scores.numpy(), sampling)
    if kept is not None:
        scores[np.setdiff1d(np.arange(len(scores)), kept)] = -torch.inf
    return scores


def gumbel(seed: int, position: int, count: int) -> NDArray[np.float64]:
    return noise_of(seed, position, np.arange(count))


def drawn(logits: Tensor, sampling: Sampling, count: int) -> list[int]:
    return [
        sample_token(logits, sampling, position=p, history=[], prompt_len=0) for p in range(count)
    ]


def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(temperature=0.7), TemperatureLogitsWarper(0.7)),
        (Sampling(temperature=1, top_k=1), TopKLogitsWarper(1)),
        (Sampling(temperature=1, top_k=50), TopKLogitsWarper(50)),
        (Sampling(temperature=1, top_k=5000), TopKLogitsWarper(5000)),
        (Sampling(temperature=1, min_p=0.05), MinPLogitsWarper(0.05)),
        (Sampling(temperature=1, min_p=1.0), MinPLogitsWarper(1.0)),
        (Sampling(temperature=1, repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
        (Sampling(temperature=1, repetition_penalty=0.8), RepetitionPenaltyLogitsProcessor(0.8)),
    ],
)
def test_each_setting_equals_its_warper(
    sampling: Sampling, warper: LogitsProcessor, seed: int
) -> None:
    logits = some_logits(seed)
    history = [3, 999, 3, 17, 400]

    expected = warper(torch.tensor([history]), logits[None].clone())[0]

    assert torch.equal(warped(logits, sampling, history), expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.7, 0.95, 0.999])
def test_top_p_equals_its_warper(top_p: float, seed: int) -> None:
    logits = some_logits(seed)[250:]  # no two are equal

    expected = TopPLogitsWarper(top_p)(torch.tensor([[0]]), logits[None].clone())[0]

    assert torch.equal(warped(logits, Sampling(temperature=1, top_p=top_p), []), expected)


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("width", [1, 4, 10, 33])
def test_top_p_keeps_as_many_ties_as_its_warper(top_p: float, width: int) -> None:
    logits = torch.arange(10).repeat_interleave(width) / 4  # transformers keeps any of the equals

    expected = TopPLogitsWarper(top_p)(torch.tensor([[0]]), logits[None].clone())[0]

    scores = warped(logits, Sampling(temperature=1, top_p=top_p), [])
    assert torch.equal(scores.sort().values, expected.sort().values)


def test_top_p_keeps_the_lowest_ids_of_ties() -> None:
    scores = warped(torch.zeros(4), Sampling(temperature=1, top_p=0.5), [])

    assert scores.isfinite().tolist() == [True, True, False, False]


@pytest.mark.parametrize("seed", range(5))
def test_all_settings_together_equal_the_chain_of_generate(seed: int) -> None:
    logits, history = some_logits(seed), [1, 2, 3, 2]
    sampling = Sampling(0.8, top_k=60, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    expected = logits[None].clone()

    for warper in (
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(60),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ):
        expected = warper(torch.tensor([history]), expected)

    assert torch.equal(warped(logits, sampling, history).sort().values, expected[0].sort().values)


def test_logits_that_the_model_masked_stay_masked() -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0])

    picks = drawn(logits, Sampling(temperature=1, top_k=3, top_p=0.999, min_p=0.1), 50)

    assert set(picks) == {1, 3}


def test_frequency_and_presence_see_the_answer_only() -> None:
    logits = torch.zeros(6)
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25)

    module._penalise(logits, sampling, [1, 1, 2, 3, 3, 4], 3)

    assert logits.tolist() == [0, 0, 0, -1.25, -0.75, 0]


def test_penalties_on_an_empty_history_change_nothing() -> None:
    sampling = Sampling(frequency_penalty=1, presence_penalty=1, repetition_penalty=2)

    assert sample_token(SKEWED, sampling, position=0, history=[], prompt_len=0) == 0


def test_a_penalty_can_change_the_greedy_choice() -> None:
    sampling = Sampling(repetition_penalty=3.0)

    assert sample_token(SKEWED, sampling, position=1, history=[0], prompt_len=1) == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_takes_the_lowest_id_of_ties(temperature: float) -> None:
    logits = torch.tensor([0.0, 7.0, 7.0, 1.0])

    assert drawn(logits, Sampling(temperature=temperature), 3) == [1, 1, 1]


def test_draws_follow_the_softmax() -> None:
    count = 12000
    expected = (SKEWED.double().softmax(-1) * count).tolist()

    counts = np.bincount(drawn(SKEWED, Sampling(temperature=1, seed=11), count)).tolist()

    assert chi_square(counts, expected) < CHI_SQUARE[7]


def test_draws_follow_the_softmax_of_what_is_kept() -> None:
    count = 8000
    expected = ((SKEWED[:5].double() / 0.7).softmax(-1) * count).tolist()

    counts = np.bincount(drawn(SKEWED, Sampling(0.7, top_k=5, seed=5), count)).tolist()

    assert chi_square(counts, expected) < CHI_SQUARE[4]


def test_neighbouring_positions_are_independent() -> None:
    logits, count = SKEWED[:4], 8000
    p = logits.double().softmax(-1)
    expected = (torch.outer(p, p).flatten() * count / 2).tolist()

    picks = np.array(drawn(logits, Sampling(temperature=1, seed=1), count))

    counts = np.bincount(picks[::2] * 4 + picks[1::2], minlength=16).tolist()
    assert chi_square(counts, expected) < CHI_SQUARE[15]


@pytest.mark.parametrize(
    ("left", "right"), [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((2**62, 5), (2**62 + 1, 5))]
)
def test_neighbouring_streams_are_uncorrelated(
    left: tuple[int, int], right: tuple[int, int]
) -> None:
    tokens = 100_000

    one, other = gumbel(*left, tokens), gumbel(*right, tokens)

    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(tokens)
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 4 / math.sqrt(tokens)


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel(3, 4, 1_000_000)

    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=4 * 1.2825 / 1000)
    assert noise.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_the_rarest_bits_are_finite_noise() -> None:
    noise = module._noise(np.array([0, 2**64 - 1], np.uint64))

    assert noise.tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)])


def test_noise_of_a_token_does_not_depend_on_others() -> None:
    everything = gumbel(7, 9, 500)

    some = gumbel(7, 9, 43)

    assert some.tolist() == everything[:43].tolist()


@pytest.mark.parametrize("count", [1, 5, module.FEW, module.FEW + 1, 500])
def test_noise_of_some_tokens_is_that_of_all(count: int) -> None:
    ids = np.sort(np.random.default_rng(count).permutation(2000)[:count])

    some = noise_of(2**63 - 1, 2**40, ids)

    assert some.tolist() == gumbel(2**63 - 1, 2**40, 2000)[ids].tolist()


def test_dropping_losers_does_not_change_the_sample() -> None:
    logits = some_logits(0, 200)
    free = drawn(logits, Sampling(temperature=1, seed=2), 100)
    winners = sorted(set(free))
    masked = torch.full((300,), -torch.inf)  # another V as well
    masked[winners] = logits[winners]

    assert drawn(masked, Sampling(temperature=1, seed=2), 100) == free


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 129, 5_000, 152_000])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=2.0, seed=2**63 - 1),
        Sampling(temperature=0.7, top_k=20, top_p=0.95),
        Sampling(temperature=1.0, top_k=500, min_p=0.01),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=1.3, top_p=0.999),
    ],
    ids=str,
)
def test_shortcuts_change_no_sample(sampling: Sampling, size: int, spread: float) -> None:
    draw = np.random.default_rng(size)
    for position in range(4):
        logits = draw.normal(0, spread, size).astype(np.float32)
        if position % 2:  # ties, and tokens that a mask excludes
            logits = logits.round()
            logits[: size // 2] = -np.inf
        scores = torch.from_numpy(logits)

        found = sample_token(scores, sampling, position=position, history=[], prompt_len=0)

        assert found == sample_plainly(logits, sampling, position)


@pytest.mark.parametrize("k", [1, 2, 20, 78, 79, 999])
@pytest.mark.parametrize("size", [1000, 5000, 5055])
def test_the_kth_largest_is_that_of_a_sort(size: int, k: int) -> None:
    scores = some_logits(k, size).numpy()

    assert module._kth_largest(scores, k) == np.sort(scores)[-k]


def test_noise_is_pinned() -> None:
    noise = gumbel(2**63 - 1, 2**40, 151_936)[[0, 1, 4, 151_935]]

    assert noise.tolist() == pytest.approx(GOLDEN_NOISE, rel=1e-12)


def test_texts_are_pinned() -> None:
    logits = some_logits(0).bfloat16()

    plain = drawn(logits, Sampling(temperature=1, seed=7), 12)
    narrow = drawn(logits, Sampling(0.8, top_k=50, top_p=0.9, min_p=0.01, seed=7), 12)

    assert plain == GOLDEN_PLAIN
    assert narrow == GOLDEN_NARROW


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_threads_and_global_random_state_do_not_matter() -> None:
    logits = some_logits(1, 150_000)
    sampling = Sampling(temperature=1.5, top_p=0.98, min_p=0.001, repetition_penalty=1.1)

    results = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(threads)
        np.random.seed(threads)
        state = torch.get_rng_state()
        results.add(sample_token(logits, sampling, position=3, history=[1, 2], prompt_len=1))
        assert torch.equal(torch.get_rng_state(), state)

    assert len(results) == 1


def test_the_input_logits_are_not_modified() -> None:
    logits = SKEWED.clone()

    sample_token(
        logits, Sampling(0.5, top_k=2, repetition_penalty=2), position=0, history=[0], prompt_len=1
    )

    assert torch.equal(logits, SKEWED)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "The model returned NaN for the token at position 9"),
        (math.inf, "The model returned inf as the largest logit for the token at position 9"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits_are_an_error(value: float, message: str, temperature: float) -> None:
    logits = torch.tensor([1.0, value, 2.0])

    with pytest.raises(ModelError, match=message):
        sample_token(
            logits, Sampling(temperature=temperature), position=9, history=[], prompt_len=0
        )


def test_logits_without_any_choice_are_an_error() -> None:
    with pytest.raises(ModelError, match="returned -inf as the largest logit"):
        sample_token(torch.full((3,), -math.inf), Sampling(), position=0, history=[], prompt_len=0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=2, top_k=40, top_p=0, min_p=1, seed=2**63 - 1),
        Sampling(repetition_penalty=1.3, frequency_penalty=-2, presence_penalty=2),
    ],
)
def test_settings_in_range_pass(sampling: Sampling) -> None:
    validate(sampling)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.01),
        ("min_p", -1e-9),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -3),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: Any) -> None:
    sampling = replace(Sampling(), **{name: value})

    with pytest.raises(WrongField, match=rf"`{name}` is {value}, not between") as refused:
        validate(sampling)

    assert refused.value.name == name


def test_a_bias_is_added_after_the_penalties() -> None:
    def sampled(*bias: tuple[int, float], **sampling: Any) -> int:
        return sample_token(
            SKEWED, Sampling(**sampling), position=1, history=[0], prompt_len=1, bias=bias
        )

    assert sampled((0, -100.0)) == 1
    assert sampled((7, 100.0)) == 7
    assert sampled((1, 0.6)) == 1
    assert sampled((0, 1.0), repetition_penalty=4.0) == 0  # 2 / 4 + 1 is as much as 1.5 of token 1
    assert sampled((7, 100.0), temperature=1.0, top_k=1) == 7


def test_log_probabilities_are_those_before_sampling_parameters() -> None:
    expected = SKEWED.double().log_softmax(-1)

    own, top = logprobs(SKEWED.bfloat16(), 3, 3)

    assert own == pytest.approx(float(expected[3]), abs=1e-6)
    assert [token for token, _ in top] == [0, 1, 2]
    assert [value for _, value in top] == pytest.approx(expected[:3].tolist(), abs=1e-6)


def test_log_probabilities_of_ties_and_of_what_cannot_be() -> None:
    logits = torch.tensor([0.0, 1.0, -math.inf, 1.0, 1.0])

    assert [token for token, _ in logprobs(logits, 0, 2)[1]] == [1, 3]
    assert logprobs(logits, 2, 0) == (NEVER, [])
    assert len(logprobs(logits, 0, 20)[1]) == 5
