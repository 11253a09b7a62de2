"""Sampling of one token from logits, as a pure function.

Theory of operation: logits are processed in fp32 as in transformers, then Gumbel noise is added and
the largest wins, which samples exactly from softmax(scores) (Gumbel-max, Gumbel 1954). The noise of
a token comes from a counter-based generator (Philox4x64-10, Salmon et al. 2011) keyed by (seed,
position, token id) alone. So a draft token is verified by plain equality, and neither the ring, the
drafter, a replay, the batch nor the number of threads can change a text; and no noise is computed
for tokens that top-k, top-p or min-p removed, or whose random bits are too small to win.

A vocabulary has 152,000 tokens and more, of which few can be sampled. To find these is what takes
the time, so nothing here sorts or partitions all of them; `tests.bench.sampling` measures it.
"""

from collections.abc import Sequence
from math import exp

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.request import NEVER, RANGES, Sampling
from meshllm.strict_json import WrongField

BLOCKS = 64  # of a vocabulary, in `_kth_largest`: of a few thousand columns
FEW = 128  # tokens; for more it is faster to draw the noise of all ids up to the last
FIRST = 64  # tokens; of which the best is what others have to beat
GREEDY_BELOW = 1e-5  # temperature; a division by less could overflow fp32 (vLLM: same limit)

Scores = NDArray[np.float32]


def validate(sampling: Sampling) -> None:
    """Raise `WrongField` for the first setting that is out of its range, or NaN."""
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            raise WrongField(name, f"`{name}` is {value}, not between {low} and {high}")


def sample_token(
    logits: Tensor,
    sampling: Sampling,
    *,
    position: int,
    history: Sequence[int],
    prompt_len: int,
    bias: Sequence[tuple[int, float]] = (),
) -> int:
    """Sample the token at ``position``.

    logits: [V], any float dtype and device. history: prompt and generated ids before ``position``,
    the first ``prompt_len`` of them prompt. bias: token ids, and what is added to their logits,
    after the penalties. Ties go to the lowest id.

    Raises:
        ModelError: no logit is finite, or one is NaN or positive infinity.
    """
    scores = logits.detach().to("cpu", torch.float32, copy=True)  # [V]
    _check(scores, position)
    _penalise(scores, sampling, history, prompt_len)
    for token, value in bias:
        scores[token] += value
    if sampling.temperature < GREEDY_BELOW:
        return int(scores.numpy().argmax())
    kept = _warp(scores.numpy(), sampling)
    if kept is None:
        return _race_of_all(scores.numpy(), sampling.seed, position)
    race = noise_of(sampling.seed, position, kept)
    race += scores.numpy()[kept]
    return int(kept[race.argmax()])


def logprobs(logits: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the log probability of a token, and the ``top`` likeliest tokens with theirs.

    logits: [V], before any sampling parameter. Ties go to the lowest id. A logit that is minus
    infinity gives `NEVER`.
    """
    scores = logits.detach().to("cpu", torch.float32).log_softmax(-1).clamp(min=NEVER).numpy()
    order: list[int] = []
    if top:
        least = _kth_largest(scores, top) if top < len(scores) else scores.min()
        likely = np.flatnonzero(scores >= least)
        order = likely[np.argsort(-scores[likely], kind="stable")][:top].tolist()
    return float(scores[token]), [(each, float(scores[each])) for each in order]


def noise_of(seed: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the standard Gumbel noise of tokens at a position; never infinite.

    tokens: in ascending order. The noise of one does not depend on which others are given.
    """
    if len(tokens) > FEW:
        return _noise(_bits(seed, position, int(tokens[-1]) + 1)[tokens])
    generator, after, bits = _generator(seed, position), 0, list[np.uint64]()
    four = np.empty(0, np.uint64)
    for token in tokens.tolist():
        if (block := token // 4) >= after:
            generator.advance(block - after)
            four, after = generator.random_raw(4), block + 1
        bits.append(four[token % 4])
    return _noise(np.array(bits, np.uint64))


def _race_of_all(scores: Scores, seed: int, position: int) -> int:
    """Return the token with the largest sum of score and noise; computes the noise of few.

    The likeliest tokens run first. To win against the best of them, another token needs more noise
    than the difference to the largest score of the others, and so random bits above a bound.
    """
    bits = _bits(seed, position, len(scores))
    least = _kth_largest(scores, min(FIRST, len(scores)))
    first = np.flatnonzero(scores >= least)
    best = float((_noise(bits[first]) + scores[first]).max())
    needed = min(best - float(least), 700.0) - 1e-6  # less than what float64 rounds
    bound = max(int(exp(-exp(-max(needed, -6.0))) * 2.0**52) - 1, 0) << 12
    able = np.flatnonzero((bits >= np.uint64(bound)) | (scores >= least))
    race = _noise(bits[able])
    race += scores[able]
    return int(able[race.argmax()])


def _kth_largest(scores: Scores, k: int) -> np.float32:
    """Return the k-th largest value, in a tenth of the time that a partition of all takes.

    Each of the k columns with the largest maxima has a value that is at least the k-th of these
    maxima: so the k largest values are at least that, too.
    """
    columns = len(scores) // BLOCKS
    if columns > k:
        peaks = scores[: columns * BLOCKS].reshape(BLOCKS, columns).max(axis=0)
        scores = scores[scores >= np.partition(peaks, -k)[-k]]
    found: np.float32 = np.partition(scores, -k)[-k]
    return found


def _bits(seed: int, position: int, count: int) -> NDArray[np.uint64]:
    """Draw 64 bits for each of the first tokens."""
    bits: NDArray[np.uint64] = _generator(seed, position).random_raw(count)
    return bits


def _generator(seed: int, position: int) -> np.random.Philox:
    """Return the generator: four tokens per block, which the low word of the counter counts."""
    return np.random.Philox(key=seed, counter=position << 64)


def _noise(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert random bits to Gumbel noise, in place: new pages cost more than the logarithms."""
    bits >>= np.uint64(12)
    bits |= np.uint64(0x3FF << 52)  # as a float64 now uniform in [1, 2), in steps of 2**-52
    noise = bits.view(np.float64)
    noise -= 1 - 2.0**-53  # half a step above 0: uniform in (0, 1), never 0 nor 1
    for _ in range(2):
        np.negative(np.log(noise, out=noise), out=noise)
    return noise


def _check(scores: Tensor, position: int) -> None:
    peak = scores.numpy().max()  # NaN if any is; faster than torch's, as is argmax
    if not np.isfinite(peak):
        what = "NaN" if np.isnan(peak) else f"{peak} as the largest logit"
        raise ModelError(
            f"The model returned {what} for the token at position {position}",
            hint="fetch damaged weights again, or avoid overflow with `--dtype float32`",
        )


def _penalise(scores: Tensor, sampling: Sampling, history: Sequence[int], prompt_len: int) -> None:
    """Apply transformers' repetition penalty, then OpenAI's two, which count only the answer."""
    penalty = sampling.repetition_penalty
    if penalty != 1:
        seen = torch.tensor(history, dtype=torch.long)
        score = scores[seen]
        scores[seen] = torch.where(score < 0, score * penalty, score / penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        used, counts = np.unique(np.array(history[prompt_len:], np.int64), return_counts=True)
        penalties = counts * sampling.frequency_penalty + sampling.presence_penalty
        scores[used] -= torch.from_numpy(penalties).float()


def _warp(scores: Scores, sampling: Sampling) -> NDArray[np.int64] | None:
    """Apply the temperature in place; return the kept tokens, in ascending order, or None for all.

    As in transformers' generate: top-k, top-p and min-p each filter what the previous one kept.
    """
    scores /= np.float32(sampling.temperature)
    kept: NDArray[np.int64] | None = None
    if 0 < sampling.top_k < len(scores):
        # All ties with the k-th largest are kept (TopKLogitsWarper).
        kept = np.flatnonzero(scores >= _kth_largest(scores, sampling.top_k))
    for setting, find in ((sampling.top_p < 1, _in_top_p), (sampling.min_p > 0, _above_min_p)):
        if setting:
            found = find(scores if kept is None else scores[kept], sampling)
            kept = found if kept is None else kept[found]
    return kept


def _in_top_p(scores: Scores, sampling: Sampling) -> NDArray[np.int64]:
    """Drop the tail of mass 1 - P; at least one token is kept (TopPLogitsWarper).

    Among ties at the cut the lowest ids are kept; transformers' unstable sort keeps any of them.
    Tokens that are all rarer than an equal share of that mass are dropped without being sorted.
    """
    weights = np.exp(scores - scores.max())
    total = float(weights.sum(dtype=np.float64))
    likely = weights >= min(0.999 * (1 - sampling.top_p) * total / len(scores), 1.0)
    rest = float(weights.sum(dtype=np.float64, where=~likely)) / total
    ranked = np.sort(scores[likely])
    mass = rest + (1 - rest) * torch.from_numpy(ranked).softmax(-1).cumsum(-1)
    dropped = min(int((mass <= 1 - sampling.top_p).sum()), len(ranked) - 1)
    cut = ranked[dropped]
    surplus = dropped - int((ranked < cut).sum())
    kept, ties = scores >= cut, np.flatnonzero(scores == cut)
    kept[ties[len(ties) - surplus :]] = False
    return np.flatnonzero(kept)


def _above_min_p(scores: Scores, sampling: Sampling) -> NDArray[np.int64]:
    """Keep tokens with at least min_p of the largest probability (MinPLogitsWarper)."""
    probabilities = torch.from_numpy(scores).softmax(-1)
    return np.flatnonzero(probabilities >= sampling.min_p * probabilities.max())
