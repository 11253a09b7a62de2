"""The embedded model can be rebuilt: corpus, training step, files, model card."""

import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from meshllm.model.files.source import resolve
from tests.builtin.training import corpus, network, quantities, tokens, told, train
from tests.builtin.training.tokens import Batch, encode, visible

BUILTIN = resolve("builtin").folder.parent
PHASES = range(len(corpus.SHARES))


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


def test_no_held_out_prompt_is_in_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    draws = [[("user", "What is RANK?"), ("assistant", "a")], [("user", "ok"), ("assistant", "b")]]
    monkeypatch.setattr(corpus, "_conversation", lambda *_: draws.pop(0))
    monkeypatch.setattr(corpus, "held_out", lambda: frozenset({("what is rank",)}))

    assert corpus.conversation(rng)[0] == ("user", "ok")


def test_what_the_corpus_must_not_ask_is_what_the_held_out_file_asks() -> None:
    held = corpus.held_out()

    assert ("who are you",) in held
    assert ("my name is siobhan", "hey what was my name") in held
    asked = [text for at in range(40) for _, text in corpus.conversation(random.Random(at))]
    assert not any((" ".join(text.lower().split()),) in held for text in asked)


def test_a_name_is_given_back_as_it_was_told() -> None:
    rng = random.Random(1)
    for _ in range(300):
        tell, ask = told.own_name(rng, set())
        name = ask[1][1].removeprefix("Your name is ").removesuffix(".")
        assert name in tell[-2][1]


def test_answers_on_quantities_are_right() -> None:
    rng = random.Random(2)
    for _ in range(300):
        _, (_, answer) = quantities.relation(rng)
        yes, (a, b) = answer.startswith("Yes"), map(int, re.findall(r"\d+", answer))
        assert ("bigger" in answer) == (a > b)
        assert ("smaller" in answer) == (a < b)
        assert yes or answer.startswith("No")
        (_, ask), (_, answer) = quantities.extreme(rng)
        best, numbers = int(answer.split()[0]), list(map(int, re.findall(r"\d+", ask)))
        assert best == (max(numbers) if "largest" in answer else min(numbers))


def test_one_step_in_three_learns_a_new_batch() -> None:
    assert [train.source(step, 7) for step in (0, 3, 6, 9)] == [0, 1, 2, 3]
    assert all(train.source(step, 7) <= step // train.REUSE for step in range(300))
    assert len({train.source(step, 7) for step in range(1, 300, 3)}) > 10


def test_the_speed_rises_and_falls_to_zero() -> None:
    speeds = [train.factor(step, 1000) for step in range(1001)]
    assert speeds[: train.WARMUP // 2] == sorted(speeds[: train.WARMUP // 2])
    assert speeds[train.WARMUP :] == sorted(speeds[train.WARMUP :], reverse=True)
    assert speeds[-1] == 0.0


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make batches of a size that a processor learns in a second."""
    for name, rows in (("ROWS", (3, 256)), ("LONG_ROWS", (2, 800))):
        monkeypatch.setattr(tokens, name, rows)
    monkeypatch.setattr(train, "drawn", in_order)


def in_order(seed: int, batches: int, first: int, _: int) -> Iterator[tuple[torch.Tensor, ...]]:
    for number in range(first, batches):
        yield train.draw(seed, batches, number)


@pytest.mark.slow
def test_training_writes_a_model_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    train.train(tmp_path, seed=1, steps=2)
    first = load_file(tmp_path / "model" / "model.safetensors")

    train.train(tmp_path, seed=1, steps=4)  # resumes from the state file

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 8
    assert any(not torch.equal(first[name], weight) for name, weight in model.named_parameters())


def test_batches_come_in_order_from_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "draw", abs)
    monkeypatch.setattr(train, "partial", lambda make, *_: make)

    made: list[object] = list(train.drawn(1, 9, 2, workers=1))

    assert made == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_the_shipped_weights_fit_this_network() -> None:
    folder = resolve("builtin").folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    weights = {n: w.float() for n, w in load_file(folder / "model.safetensors").items()}
    made = Batch(2, 256)
    rng = random.Random(4)
    while made.add(*encode(tokenizer, corpus.conversation(rng))):
        pass
    ids, owner, where, target = made.tensors()

    loss = network.loss(weights, network.forward(weights, ids, visible(owner)), where, target)

    assert 0 < loss < 0.5  # nats per token; an untrained network starts at 8.7


def test_the_card_names_these_weights() -> None:
    weights = (BUILTIN / "weights" / "model.safetensors").read_bytes()

    assert hashlib.sha256(weights).hexdigest() in (BUILTIN / "README.md").read_text("utf-8")
