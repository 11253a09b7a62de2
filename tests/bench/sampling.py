"""What it takes to sample a token of 151,936, by setting: `python -m tests.bench.sampling`.

Beside it stands the same without shortcuts: sorts of the whole vocabulary, and noise for all of it.
Both must give the same tokens. The logits are Gaussian, with a few far above the others, as those
of language models are.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch

from meshllm.model.sampling import sample_token
from meshllm.request import Sampling
from tests.bench.report import Report, parser_of
from tests.builders.plain_sampling import sample_plainly

SIZE = 151_936
LIKELY = 30
SETTINGS = {
    "temperature 0.7": Sampling(temperature=0.7, seed=1),
    "top-k 20, top-p 0.95": Sampling(temperature=0.6, top_k=20, top_p=0.95, seed=1),
    "top-k 50": Sampling(temperature=0.6, top_k=50, seed=1),
    "top-p 0.8": Sampling(temperature=0.7, top_p=0.8, seed=1),
    "min-p 0.05": Sampling(temperature=0.7, min_p=0.05, seed=1),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Median milliseconds for a token."""

    setting: str
    ms: float
    plain_ms: float
    differing: int
    """Tokens that are not the same."""


def main() -> None:
    """Print the table."""
    parser = parser_of("sampling", __doc__)
    parser.add_argument("--tokens", type=int, default=50, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(options, threads=1)
    report.say(f"{'setting':<22}{'ms':>8}{'plain':>8}{'ratio':>8}")
    rows = [measured(name, options.tokens) for name in SETTINGS]
    for row in rows:
        report.say(
            f"{row.setting:<22}{row.ms:>8.2f}{row.plain_ms:>8.2f}{row.plain_ms / row.ms:>7.1f}x"
        )
    report.write(rows)
    sys.exit(any(row.differing for row in rows))


def measured(name: str, tokens: int) -> Row:
    """Sample with a setting, both ways in turn."""
    sampling, draw = SETTINGS[name], np.random.default_rng(0)
    times: tuple[list[float], list[float]] = [], []
    differing = 0
    for position in range(tokens):
        logits = draw.normal(0, 2.5, SIZE).astype(np.float32)
        logits[:LIKELY] += np.linspace(5, 15, LIKELY, dtype=np.float32)
        scores = torch.from_numpy(logits)
        ways: tuple[Callable[[], int], ...] = (
            lambda: sample_token(scores, sampling, position=position, history=(), prompt_len=0),  # noqa: B023
            lambda: sample_plainly(logits, sampling, position),  # noqa: B023
        )
        found = []
        for way, spent in zip(ways, times, strict=True):
            since = perf_counter()
            found.append(way())
            spent.append((perf_counter() - since) * 1e3)
        differing += found[0] != found[1]
    return Row(name, median(times[0]), median(times[1]), differing)


if __name__ == "__main__":
    main()
