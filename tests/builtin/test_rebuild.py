"""The embedded model can be rebuilt: corpus, training step, files, model card."""

import hashlib
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from meshllm.model.files.source import resolve
from tests.builtin.training import corpus, network, train
from tests.builtin.training.tokens import batch

BUILTIN = resolve("builtin").folder.parent
PHASES = range(len(train.PHASES) + 1)


def talks(seed: int, phase: int) -> list[object]:
    rng = random.Random(seed)
    return [corpus.conversation(rng, phase=phase, long=at % 9 == 0) for at in range(200)]


@pytest.mark.parametrize("phase", PHASES)
def test_the_corpus_is_the_same_for_a_seed_and_not_for_another(phase: int) -> None:
    assert talks(7, phase) == talks(7, phase)
    assert talks(7, phase) != talks(8, phase)


@pytest.mark.parametrize("phase", PHASES)
def test_roles_alternate_in_every_conversation(phase: int) -> None:
    rng = random.Random(3)
    for _ in range(300):
        roles = [role for role, _ in corpus.conversation(rng, phase=phase) if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.slow
def test_training_writes_a_model_that_transformers_loads(tmp_path: Path) -> None:
    train.train(tmp_path, seed=1, tokens=2 * train.STEP)
    first = load_file(tmp_path / "model" / "model.safetensors")

    train.train(tmp_path, seed=1, tokens=3 * train.STEP)  # resumes from the state file

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 8
    assert any(not torch.equal(first[name], weight) for name, weight in model.named_parameters())


@pytest.mark.slow
def test_the_shipped_weights_fit_this_network() -> None:
    folder = resolve("builtin").folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    weights = {n: w.float() for n, w in load_file(folder / "model.safetensors").items()}
    ids, mask, where, target = batch(tokenizer, "a test", phase=0, long=False).tensors()

    loss = network.learn(
        {n: w.requires_grad_() for n, w in weights.items()},
        network.forward(weights, ids, mask),
        where,
        target,
    )

    assert 0 < loss < 1.0  # nats per token; an untrained network starts at 8.7


def test_the_card_names_these_weights() -> None:
    weights = (BUILTIN / "weights" / "model.safetensors").read_bytes()

    assert hashlib.sha256(weights).hexdigest() in (BUILTIN / "README.md").read_text("utf-8")
