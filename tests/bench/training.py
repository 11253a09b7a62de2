"""Steps of LoRA through rings of processes, against one process with plain transformers.

``python -m tests.bench.training [--model NAME] [--layers N] [--nodes 1,2] [--batch 8]
[--length 128] [--rounds 4]``

The model has random weights. A ring of one node has two threads, as the single process; in larger
rings each node has one, on the same cores. The rings are asked in turn with the single process, and
only one of them exists at a time. The losses of all must be the same but for rounding.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.files.source import load_stock, open_folder
from meshllm.remote import from_pretrained
from tests.bench.report import Report, counts, parser_of
from tests.processes.fleet import ALONE, open_fleet

THREADS = 2
MOST = 0.01  # difference of losses


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds."""

    nodes: int
    step_s: float
    alone_s: float
    tokens_per_s: float
    ratio: float
    """Time of the single process divided by that of the ring, in the same round."""
    difference: float
    """The largest one of losses, relative: sums over micro-batches round otherwise."""


class LoraRun:
    """A model with an adapter, and the batch that it is trained with."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        torch.manual_seed(1)
        config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self._model: Any = get_peft_model(model, config)
        trained = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=0.1)
        self._ids = ids
        self.losses: list[float] = []

    def step(self) -> float:
        """Return the seconds of a step."""
        begin = perf_counter()
        loss = self._model(self._ids, labels=self._ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        return perf_counter() - begin


@contextmanager
def ring_of(count: int, folder: Path) -> Iterator[Path]:
    """Run nodes in processes; yield the state folder of one."""
    threads = str(THREADS if count == 1 else 1)
    options = ("--model", str(folder), "--policy", "proportional", "--threads", threads, *ALONE)
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("0")
        for at in range(count):
            fleet.node(str(at)).start("--join", ticket, "--members", str(count), *options)
        fleet.form()
        yield fleet.node("0").state


def measured(count: int, folder: Path, ids: torch.Tensor, rounds: int) -> Row:
    """Compare a ring with the single process, after one step of each."""
    alone = LoraRun(load_stock(open_folder("random", folder), "auto"), ids)
    with ring_of(count, folder) as state:
        ring = LoraRun(from_pretrained(folder, state=state), ids)
        pairs = [(ring.step(), alone.step()) for _ in range(1 + rounds)][1:]
    step_s = median(own for own, _ in pairs)
    return Row(
        count,
        step_s,
        median(other for _, other in pairs),
        ids.numel() / step_s,
        median(other / own for own, other in pairs),
        max(abs(own / its - 1) for own, its in zip(ring.losses, alone.losses, strict=True)),
    )


def main() -> None:
    """Print the table."""
    parser = parser_of("training", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--layers", type=int, metavar="N", help="fewer than the model has")
    parser.add_argument("--nodes", type=counts, default=(1, 2), metavar="N,N")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens of each")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    options: Namespace = parser.parse_args()
    torch.set_num_threads(THREADS)
    report = Report(options, threads=THREADS)
    report.say(
        "| nodes | a step, s | one process, s | tokens/s | speed | losses differ by |",
        "|---|---|---|---|---|---|",
    )
    rows = []
    with random_model(options.model, torch.bfloat16, options.layers) as folder:
        config = open_folder("random", folder).config
        ids = torch.randint(0, config.vocab_size, (options.batch, options.length))
        for count in options.nodes:
            row = measured(count, folder, ids, options.rounds)
            rows.append(row)
            report.say(
                f"| {row.nodes} | {row.step_s:.2f} | {row.alone_s:.2f} | {row.tokens_per_s:.0f} |"
                f" {row.ratio:.2f}x | {row.difference:.0e} |"
            )
    report.write(rows)
    sys.exit(any(row.difference > MOST for row in rows))


if __name__ == "__main__":
    main()
