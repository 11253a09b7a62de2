"""Runners of tiny models, their sessions, and what they say."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.execution import Execution, Strategy
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Span
from meshllm.testing.models import tiny_model

COUNTS = (2, 3, 5, 9, 17)
INVARIANT = ("llama", "qwen3", "mistral", "gemma3_text", "gpt2", "phi3")


def runner_of(folder: Path, family: str, dtype: torch.dtype, counts: Any = COUNTS) -> Runner:
    source = tiny_model(folder, family, dtype=dtype)
    layers = source.config.num_hidden_layers
    return Runner(load_shard(source, Span(0, layers), embed=True, head=True), counts)


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def filled(runner: Runner, length: int) -> SpanCache:
    cache = runner.new_cache()
    runner.prefill(ids(length), cache)
    return cache


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [each for each in caplog.records if each.name.startswith("meshllm.")]
    return [each.getMessage() for each in own if each.levelno == logging.WARNING]


def how(told: Execution) -> tuple[Strategy, str, bool]:
    return told.strategy, told.reason, told.is_fallback
