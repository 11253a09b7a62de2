"""Train the embedded model from scratch: `python -m tests.builtin.training.train --out DIR`.

Every batch depends on the seed and its number only, and the schedule on tokens only, so a run may
be stopped, resumed from its state file, or slowed down without changing the result.
"""

import argparse
import json
import logging
import time
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from meshllm.model.files.source import resolve
from tests.builtin.training import network
from tests.builtin.training.optimizer import Optimizer
from tests.builtin.training.tokens import END, PAD, batch, save_tokenizer, train_tokenizer

logger = logging.getLogger(__name__)
STEP = 2496  # tokens per step, padding included
STEPS = 6300  # of the run that made the weights
PHASES = (1200, 2200, 2800, 4200)  # steps at which the shares of the lessons change
WARMUP = 60  # steps
# (step, speed) knots of the cool-down, which was extended twice while the loss still improved.
BENDS = ((0, 1.0), (2800, 1.0), (3600, 15 / 23), (4800, 75 / 253), (STEPS, 0.0))
LONG = 12  # every twelfth batch has long conversations
KEPT = resolve("builtin").folder / "tokenizer.json"  # of an early corpus; fixed since
SAVE = 200  # steps between two saves
REFRESH = 0.2  # speed at the start of a refresh, which then cools down to 0


def factor(at: float) -> float:
    """Speed at a step of the run: warm up, stay, then cool down along the bends."""
    (left, high), (right, low) = next(pair for pair in pairwise(BENDS) if at < pair[1][0])
    return min((at + 1) / WARMUP, high + (low - high) * (at - left) / (right - left))


def save_model(weights: dict[str, Tensor], tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder for transformers; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: weight.detach().bfloat16().contiguous() for name, weight in weights.items()}
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
    save_file(state | optimizer.state, path.with_suffix(".tmp"), metadata={"step": str(step)})
    path.with_suffix(".tmp").replace(path)


def load_state(optimizer: Optimizer, path: Path) -> int:
    """Load a state file; return its number of steps."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, weight in optimizer.weights.items():
            weight.copy_(file.get_tensor(f"weight.{name}"))
        for name, moment in optimizer.state.items():
            moment.copy_(file.get_tensor(name))
        return int(file.metadata()["step"])


def train(out: Path, seed: int, tokens: int) -> None:
    """Train for ``tokens`` tokens; resume if `out` contains a state file."""
    tokenizer = Tokenizer.from_file(str(KEPT)) if KEPT.exists() else train_tokenizer(seed)
    optimizer = Optimizer(network.start(tokenizer.get_vocab_size(), seed))
    state = out / "state.safetensors"
    out.mkdir(parents=True, exist_ok=True)
    steps = tokens // STEP
    first = load_state(optimizer, state) if state.exists() else 0
    began, mean = time.monotonic(), 0.0
    for step in range(first, steps):
        value = _step(optimizer, tokenizer, f"{seed} {step}", step, steps)
        mean = value if step == first else mean * 0.98 + value * 0.02
        if step % 25 == 0:
            pace = (step + 1 - first) * STEP / (time.monotonic() - began)
            logger.info("step %d of %d loss %.4f pace %.0f tokens/s", step, steps, mean, pace)
        if (step + 1) % SAVE == 0 or step + 1 == steps:
            save_state(optimizer, step + 1, state)
            save_model(optimizer.weights, tokenizer, out / "model")


def refresh(out: Path, seed: int, steps: int) -> None:
    """Fine-tune the shipped model on a changed corpus, without a full run."""
    tokenizer = Tokenizer.from_file(str(KEPT))
    optimizer = Optimizer(network.start(tokenizer.get_vocab_size(), seed))
    with safe_open(KEPT.parent / "model.safetensors", "pt") as file, torch.no_grad():
        for name, weight in optimizer.weights.items():
            weight.copy_(file.get_tensor(name))
    for step in range(steps):
        speed = REFRESH * min((step + 1) / 10, (steps - step) / steps)
        loss = _learn(optimizer, tokenizer, f"{seed} refresh {step}", len(PHASES), step, speed)
        if step % 25 == 0:
            logger.info("step %d of %d loss %.4f", step, steps, loss)
    save_model(optimizer.weights, tokenizer, out / "model")


def _step(optimizer: Optimizer, tokenizer: Tokenizer, name: str, step: int, steps: int) -> float:
    at = step * STEPS / steps  # a run of another length has the same phases
    phase = sum(at >= begin for begin in PHASES)
    return _learn(optimizer, tokenizer, name, phase, step, factor(at))


def _learn(
    optimizer: Optimizer, tokenizer: Tokenizer, name: str, phase: int, step: int, speed: float
) -> float:
    made = batch(tokenizer, name, phase=phase, long=step % LONG == LONG - 1)
    ids, mask, where, target = made.tensors()
    hidden = network.forward(optimizer.weights, ids, mask)
    loss = network.learn(optimizer.weights, hidden, where, target)
    optimizer.step(step + 1, speed)
    return loss


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for state and model")
    parser.add_argument("--seed", type=int, default=7, help="seed of weights and corpus")
    parser.add_argument("--tokens", type=int, default=STEPS * STEP, help="tokens to train on")
    parser.add_argument("--refresh", type=int, metavar="STEPS", help="fine-tune the shipped model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if options.refresh:
        refresh(options.out, options.seed, options.refresh)
    else:
        train(options.out, options.seed, options.tokens)


if __name__ == "__main__":
    main()
