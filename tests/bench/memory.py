"""Peak memory of loading a span: ``python -m tests.bench.memory``.

A model with the dimensions of Qwen3-0.6B and a mixture of experts, both with random weights, are
written to a temporary folder; each span is loaded in its own process. `anonymous` is memory that
the kernel cannot reclaim; `mapped` is the pages of the file, shared and reclaimable. The peaks are
the highest samples while loading and, in the last column, also while running one token.
"""

import gc
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from meshllm.bench.ring_table import DIMENSIONS
from meshllm.model.files.source import open_folder
from meshllm.model.split.meta_model import Part, quiet
from meshllm.model.steps.load import load_shard
from meshllm.names import Span
from tests.bench.report import Report, parser_of

LIMIT = 1.15  # limit relative to the bytes of the span
INTERVAL_S = 0.001

SPANS = {
    "qwen3-0.6b": ("0:28+ends", "0:14+embed", "10:20", "10:11", "28:28+head"),
    # The files have a tensor per expert, the model one for all experts of a layer.
    "experts": ("0:1", "0:2", "0:4"),
}
DTYPES = ("bfloat16", "float32")
"""In the stored dtype nothing is copied; in a wider one every byte is anonymous."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Memory of one span, in bytes."""

    model: str
    span: str
    dtype: str
    weights: int
    """Parameters of the span in its dtype; tied ones count once."""
    anonymous: int
    """Peak growth of anonymous memory."""
    mapped: int
    """Peak growth of mapped pages, including the first token."""

    @property
    def ratio(self) -> float:
        """Anonymous memory divided by the weights."""
        return self.anonymous / self.weights


class Peak:
    """Samples the memory of this process in a thread, and keeps the peaks."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        gc.collect()
        self._base = _status()
        self._top = self._base

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        self._done.set()
        self._thread.join()

    @property
    def anonymous(self) -> int:
        return self._top[0] - self._base[0]

    @property
    def mapped(self) -> int:
        return self._top[1] - self._base[1]

    def _look(self) -> None:
        now = _status()
        self._top = max(self._top[0], now[0]), max(self._top[1], now[1])

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._look()


def write_model(name: str, folder: Path) -> None:
    """Write a model with random bfloat16 weights, in files of 250 MB."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    if name in DIMENSIONS:
        config = DIMENSIONS[name]()
    else:
        config = MixtralConfig(
            vocab_size=1024,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=8,
            num_local_experts=8,
        )
    with quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="250MB")


def measure(folder: Path, span: str, dtype: str) -> Cost:
    """Load one span in this process, and run one token through it."""
    part = parse(span)
    source = open_folder(folder.name, folder)
    load_shard(source, Span(1, 2), embed=False, head=False)  # one-time costs of the process
    with Peak() as loading:
        shard = load_shard(
            source,
            part.span,
            embed=part.embed,
            head=part.head,
            dtype=getattr(torch, dtype),
        )
    weights = sum({p.data_ptr(): p.nbytes for p in shard.model.parameters()}.values())
    with Peak() as running:
        hidden = torch.zeros(1, 1, source.config.hidden_size, dtype=getattr(torch, dtype))
        token = torch.zeros(1, 1, dtype=torch.int64)
        shard.forward(token if part.embed else hidden, shard.new_cache())
    return Cost(
        source.name, span, dtype, weights, loading.anonymous, loading.mapped + running.mapped
    )


def parse(text: str) -> Part:
    """Parse ``a:b`` with ``+embed``, ``+head`` or ``+ends``."""
    span, _, ends = text.partition("+")
    return Part(Span.parse(span), ends in {"embed", "ends"}, ends in {"head", "ends"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every span in its own process; return 1 if one exceeds `LIMIT`."""
    parser = parser_of("memory", __doc__)
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "SPAN", "DTYPE"))
    options = parser.parse_args(arguments)
    if options.measure:
        folder, span, dtype = options.measure
        print(json.dumps(asdict(measure(Path(folder), span, dtype))))
        return 0
    report, costs = Report(options), list[Cost]()
    with tempfile.TemporaryDirectory() as folder:
        for name, spans in SPANS.items():
            write_model(name, Path(folder, name))
            costs += [_apart(Path(folder, name), s, dtype) for dtype in DTYPES for s in spans]
    report.say(_table(costs))
    report.write(costs)
    return int(any(cost.ratio > LIMIT for cost in costs))


def _apart(folder: Path, span: str, dtype: str) -> Cost:
    command = [sys.executable, "-m", "tests.bench.memory", "--measure", str(folder), span, dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Cost(**json.loads(output.splitlines()[-1]))


def _table(costs: Sequence[Cost]) -> str:
    row = "{:<11} {:<11} {:<9} {:>10} {:>10} {:>6} {:>10}".format
    lines = [row("model", "span", "dtype", "weights", "anonymous", "ratio", "mapped")]
    for cost in costs:
        sizes = _mb(cost.weights), _mb(cost.anonymous), f"{cost.ratio:.2f}", _mb(cost.mapped)
        lines.append(row(cost.model, cost.span, cost.dtype, *sizes))
    return "\n".join(lines)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _status() -> tuple[int, int]:
    """Read (anonymous, mapped) bytes of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]  # two names


if __name__ == "__main__":
    sys.exit(main())
