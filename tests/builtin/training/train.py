"""Train the embedded model from scratch: `python -m tests.builtin.training.train --out DIR`.

Every batch depends on the seed and its number only, so a run may be stopped and resumed from its
state file. It takes a GPU if there is one; worker processes make the batches meanwhile.
"""

import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.builtin.score import WEIGHTS
from tests.builtin.training import network
from tests.builtin.training.optimizer import Optimizer
from tests.builtin.training.tokens import (
    END,
    PAD,
    ROWS,
    batch,
    save_tokenizer,
    train_tokenizer,
    visible,
)

logger = logging.getLogger(__name__)
STEPS = 14_000  # of the run that made the weights
WARMUP = 200  # steps
LATER = 0.08  # share of the steps after which the lessons change
REUSE = 3  # steps for each new batch; the others take an earlier one
LONG = 12  # every twelfth batch has long conversations
KEPT = WEIGHTS / "tokenizer.json"  # of an early corpus; fixed since
SAVE = 1000  # steps between two saves
AHEAD = 4  # batches that each worker prepares


def factor(step: int, steps: int) -> float:
    """Speed at a step of the run: warm up, then a cosine down to 0."""
    return min((step + 1) / WARMUP, 1.0) * (1 + math.cos(math.pi * step / steps)) / 2


def source(step: int, seed: int) -> int:
    """Return the number of the batch of a step: every third one is new, the others are reused."""
    newest = step // REUSE
    return newest if step % REUSE == 0 else random.Random(f"{seed} {step}").randint(0, newest)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(KEPT)) if KEPT.exists() else train_tokenizer(7)


def draw(seed: int, batches: int, number: int) -> tuple[Tensor, ...]:
    """Make one batch in small integers."""
    torch.set_num_threads(1)
    phase = int(number >= LATER * batches)
    made = batch(_tokenizer(), f"{seed} {number}", phase=phase, long=number % LONG == LONG - 1)
    tokens, owner, where, target = made.tensors()
    return tokens.short(), owner.short(), where.int(), target.short()


def drawn(seed: int, batches: int, first: int, workers: int) -> Iterator[tuple[Tensor, ...]]:
    """Draw the batches from a number on, some of them ahead, in other processes."""
    make = partial(draw, seed, batches)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        ahead = range(first, min(first + workers * AHEAD, batches))
        waiting = [pool.submit(make, number) for number in ahead]
        for number in range(first, batches):
            yield waiting.pop(0).result()
            if number + workers * AHEAD < batches:
                waiting.append(pool.submit(make, number + workers * AHEAD))
        pool.shutdown(cancel_futures=True)


def save_model(weights: dict[str, Tensor], tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder for transformers; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: weight.detach().bfloat16().cpu() for name, weight in weights.items()}
    save_file(half, folder / "model.tmp", metadata={"format": "pt"})
    (folder / "model.tmp").chmod(0o644)
    (folder / "model.tmp").replace(folder / "model.safetensors")
    config = network.settings(tokenizer.get_vocab_size(), END, PAD)
    generation = {"eos_token_id": END, "pad_token_id": PAD, "do_sample": False}
    for name, content in (("config", config), ("generation_config", generation)):
        text = json.dumps(content, indent=2)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder)


def save_state(optimizer: Optimizer, step: int, path: Path) -> None:
    """Write the state that a run needs to resume."""
    state = {f"weight.{name}": weight.detach() for name, weight in optimizer.weights.items()}
    state |= optimizer.state
    kept = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    save_file(kept, path.with_suffix(".tmp"), metadata={"step": str(step)})
    path.with_suffix(".tmp").replace(path)


def load_state(optimizer: Optimizer, path: Path) -> int:
    """Load a state file; return its number of steps."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, weight in optimizer.weights.items():
            weight.copy_(file.get_tensor(f"weight.{name}"))
        for name, moment in optimizer.state.items():
            moment.copy_(file.get_tensor(name))
        return int(file.metadata()["step"])


class Trainer:
    """Weights, optimizer and the batches so far, on the fastest device."""

    def __init__(self, seed: int, steps: int, workers: int) -> None:
        """Start with untrained weights."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.seed, self.steps, self.workers = seed, steps, workers
        made = network.start(_tokenizer().get_vocab_size(), seed)
        weights = {n: w.detach().to(self.device).requires_grad_() for n, w in made.items()}
        self.optimizer = Optimizer(weights)
        self.forward = network.forward
        if self.device.type == "cuda":
            self.forward = torch.compile(network.forward, dynamic=False)

    def learn(self, made: tuple[Tensor, ...], step: int) -> Tensor:
        """Do one step; return the loss before it."""
        tokens, owner, where, target = (each.to(self.device).long() for each in made)
        hidden = self.forward(self.optimizer.weights, tokens, visible(owner))
        loss = network.loss(self.optimizer.weights, hidden, where, target)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(step + 1, factor(step, self.steps))
        return loss.detach()

    def run(self, first: int, out: Path, seconds: float) -> None:
        """Do the steps from ``first`` on, saving now and then; stop after ``seconds``."""
        batches = -(-self.steps // REUSE)
        fresh = drawn(self.seed, batches, 0, self.workers)
        seen = [next(fresh) for _ in range(-(-first // REUSE))]
        began, mean = time.monotonic(), torch.zeros((), device=self.device)
        for step in range(first, self.steps):
            if step % REUSE == 0:
                seen.append(next(fresh))
            loss = self.learn(seen[source(step, self.seed)], step)
            mean = loss if step == first else mean * 0.98 + loss * 0.02
            if step % 500 == 0:
                pace = (step + 1 - first) * ROWS[0] * ROWS[1] / (time.monotonic() - began)
                logger.info("step %d loss %.4f pace %.0f tokens/s", step, mean, pace)
            over = step + 1 == self.steps or time.monotonic() - began > seconds
            if over or (step + 1) % SAVE == 0:
                save_state(self.optimizer, step + 1, out / "state.safetensors")
                save_model(self.optimizer.weights, _tokenizer(), out / "model")
            if over:
                return


def train(out: Path, seed: int, steps: int, *, workers: int = 1, seconds: float = 1e9) -> None:
    """Train for ``steps``; resume if `out` contains a state file."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(seed, steps, workers)
    state = out / "state.safetensors"
    first = load_state(trainer.optimizer, state) if state.exists() else 0
    trainer.run(first, out, seconds)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for state and model")
    parser.add_argument("--seed", type=int, default=7, help="seed of weights and corpus")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to train")
    parser.add_argument("--seconds", type=float, default=1e9, help="save and stop after this time")
    workers = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument("--workers", type=int, default=workers, help="processes that make batches")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(
        options.out, options.seed, options.steps, workers=options.workers, seconds=options.seconds
    )


if __name__ == "__main__":
    main()
