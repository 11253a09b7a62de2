"""A split LM head has the logits of the whole one, or is not split."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.capacity import shape_of
from meshllm.model.files.source import Source
from meshllm.model.split.shard import Shard
from meshllm.model.steps import lm_head as head
from meshllm.model.steps.lm_head import BLOCK, LEAST, MIN_OUTPUTS, find_parts, parts_of
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant
from meshllm.protocol.drafting.window import STEPS
from meshllm.testing.models import tiny_model
from tests.builders.lm_heads import PARTS, VOCABULARY, head_of


def rows_for(source: Source, count: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, count, 64, generator=generator).to(shape_dtype(source))


def shape_dtype(source: Source) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, shape_of(source).dtype)
    return dtype


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"),
    [
        (151_936, 1024, (range(75_968), range(75_968, 151_936))),
        (128_256, 2048, (range(64_128), range(64_128, 128_256))),
        (32_064, 3072, (range(16_000), range(16_000, 32_064))),
        (50_257, 1600, None),
        (MIN_OUTPUTS, LEAST // MIN_OUTPUTS, (range(4096), range(4096, MIN_OUTPUTS))),
        (MIN_OUTPUTS, LEAST // MIN_OUTPUTS - 1, None),
        (MIN_OUTPUTS - BLOCK, LEAST, None),
    ],
)
def test_a_large_head_is_split_into_whole_blocks(
    outputs: int, inputs: int, parts: tuple[range, range] | None
) -> None:
    assert parts_of(outputs, inputs) == parts


FAMILIES = "llama", "gemma2", "cohere", "granite", "gpt2", "phi", "mamba2"
FORMATS = (
    (Quant.NONE, torch.float32),
    (Quant.NONE, torch.bfloat16),
    (Quant.INT8, torch.bfloat16),
)


@pytest.mark.parametrize(
    ("family", "quant", "dtype"),
    [
        pytest.param(
            *(family, *each),
            marks=[] if at == 0 or each == FORMATS[at % 3] else [pytest.mark.slow],
        )
        for at, family in enumerate(FAMILIES)
        for each in FORMATS
    ],
)
def test_parts_have_the_logits_of_the_whole(
    family: str, dtype: torch.dtype, quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)
    source = tiny_model(tmp_path / "model", family, dtype=dtype)
    assert find_parts(source, shape_of(source)) == PARTS

    x, options = rows_for(source), {"quant": quant, "cache": tmp_path / "cache"}
    for _ in range(2):  # the second time packed weights come from the disk
        whole, *parts = (
            Runner(head_of(source, outputs, **options), STEPS) for outputs in (None, *PARTS)
        )
        for rows in (1, 5):
            given = [part.step(x[:, :rows], None) for part in parts]
            assert [part.shape[-1] for part in given] == [64, 64]
            assert torch.equal(torch.cat(given, -1), whole.step(x[:, :rows], None))


def test_a_head_cast_on_load_is_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)
    source = tiny_model(tmp_path)

    assert find_parts(source, shape_of(source, torch.bfloat16)) is None


def test_a_head_with_dependent_logits_is_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)
    source, stock = tiny_model(tmp_path), Shard.forward
    monkeypatch.setattr(
        Shard, "forward", lambda *args, **options: stock(*args, **options).softmax(-1)
    )

    assert find_parts(source, shape_of(source)) is None
    assert told(caplog) == ["the LM head is not split: its logits depend on one another"]


def test_the_logits_of_parts_are_compared_once_per_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)
    source, results = tiny_model(tmp_path / "model"), iter((False, True))
    monkeypatch.setattr(head, "_is_splittable", lambda *_: next(results))
    find = partial(find_parts, source, shape_of(source), tmp_path / "cache")

    assert [find(), find(), find()] == [None, PARTS, PARTS]  # a failure is not cached


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_a_custom_head_is_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)
    source = tiny_model(tmp_path)

    class Other(torch.nn.Linear):
        """A module with its own use of its weights."""

    shard = head_of(source, None)
    monkeypatch.setattr(type(shard.model), "get_output_embeddings", lambda _: Other(64, VOCABULARY))
    with pytest.raises(ModelError, match="type `Other` cannot be split"):
        head_of(source, PARTS[0])
    assert find_parts(source, shape_of(source)) is None
    (warning,) = told(caplog)
    assert "ModelError: An LM head of type `Other`" in warning
