"""The attention of a stock model, replaced and restored."""

from pathlib import Path

import torch
from transformers import AttentionInterface

from meshllm.model.steps.attention_switch import AttentionSwitch
from meshllm.model.steps.load import load_shard
from meshllm.names import Span
from meshllm.testing.models import tiny_model


def test_a_model_outlives_its_switch(tmp_path: Path) -> None:
    shard = load_shard(tiny_model(tmp_path), Span(0, 6), embed=True, head=True)
    config, ids = shard.model.config, torch.tensor([[5, 6, 7]])
    before, known = shard.forward(ids, shard.new_cache()), set(AttentionInterface())

    switch = AttentionSwitch(shard)
    name = config._attn_implementation
    assert name not in known
    del switch

    assert config._attn_implementation == "sdpa"
    assert set(AttentionInterface()) == known
    assert torch.equal(shard.forward(ids, shard.new_cache()), before)


def test_a_switch_does_not_undo_another_switch(tmp_path: Path) -> None:
    shard = load_shard(tiny_model(tmp_path), Span(0, 6), embed=True, head=True)
    first = AttentionSwitch(shard)
    shard.model.config._attn_implementation = "eager"

    first.close()

    assert shard.model.config._attn_implementation == "eager"
