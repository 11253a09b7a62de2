"""What a mask of a grammar costs, beside a step of Qwen3-0.6B: `python -m tests.bench.masks`.

A vocabulary of the size of Qwen3's (151,936 tokens: those of the built-in model, and made-up words)
masks the logits of every token of JSON that satisfies random schemas. A step is that of
`meshllm bench --model qwen3-0.6b`, with random weights, run before the masks on the same machine;
the command fails if the median mask takes more than a tenth of it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from tokenizers import Tokenizer

from meshllm.model.files.source import resolve
from meshllm.model.text.grammar import Vocabulary
from tests.bench.report import Report, parser_of
from tests.builders.json_schemas import draw_schema

SIZE = 151_936
MOST = 0.1  # of a step
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds for a token."""

    step_ms: float
    mask_ms: float
    """The median; the mask is computed and applied, and the token taken."""
    slow_ms: float
    """The 95th percentile."""
    tokens: int


def main() -> None:
    """Print the table."""
    parser = parser_of("masks", __doc__)
    parser.add_argument("--schemas", type=int, default=40, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    step_ms = _step_ms()
    times = list(_mask_ms(options.schemas))
    row = Row(step_ms, median(times), quantiles(times, n=20)[-1], len(times))
    report = Report(options, threads=1)
    report.say(
        f"step {row.step_ms:.1f} ms, mask {row.mask_ms:.2f} ms: {row.mask_ms / step_ms:.1%}",
        f"95 % of {row.tokens} masks take up to {row.slow_ms:.2f} ms: {row.slow_ms / step_ms:.1%}",
    )
    report.write([row])
    sys.exit(row.mask_ms > MOST * step_ms)


def _step_ms() -> float:
    """Return the time of a decode step of a ring of one, in another process."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        words = ("--nodes", "1", "--rounds", "1", "--new-tokens", "16", "--threads", "1")
        command = [sys.executable, "-m", "meshllm", "bench", "--model", "qwen3-0.6b", *words]
        subprocess.run([*command, "--json", path], check=True, stdout=subprocess.PIPE)
        found = json.loads(path.read_text("utf-8"))
    return float(next(row["ms_per_token"] for row in found["rows"] if row.get("nodes") == 1))


def _mask_ms(schemas: int) -> Iterator[float]:
    """Yield the time for each token of values that satisfy random schemas."""
    text, tokenizer = _tokenizer()
    vocabulary = Vocabulary(text, [0])
    draw, logits = Random(0), torch.randn(SIZE)
    for _ in range(schemas):
        schema = json.dumps(draw_schema(draw))
        grammar = vocabulary.json_schema(schema)
        for _ in range(120):
            begin = perf_counter()
            masked = grammar.masked(logits)
            seconds = perf_counter() - begin
            token = int(masked.argmax())
            if token == 0:  # the end
                break
            begin = perf_counter()
            grammar.take([token])
            yield (seconds + perf_counter() - begin) * 1e3
            logits = torch.randn(SIZE)
    assert tokenizer.get_vocab_size() == SIZE


def _tokenizer() -> tuple[str, Tokenizer]:
    """Return a tokenizer of the size of Qwen3's, as JSON and as it is."""
    fields = json.loads((resolve("builtin").folder / "tokenizer.json").read_text("utf-8"))
    vocabulary: dict[str, int] = fields["model"]["vocab"]
    draw = Random(1)
    number = 1 + max(vocabulary.values(), default=0)
    number = max(number, *(each["id"] + 1 for each in fields["added_tokens"]))
    while number < SIZE:
        word = "".join(draw.choices(LETTERS, k=draw.randint(2, 9)))
        word = f"\u0120{word}" if draw.random() < 0.5 else word
        if word not in vocabulary:
            vocabulary[word] = number
            number += 1
    text = json.dumps(fields)
    return text, Tokenizer.from_str(text)


if __name__ == "__main__":
    main()
