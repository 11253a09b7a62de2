"""Replacing the modules of a model."""

import ast
from pathlib import Path

import meshllm
from meshllm.model.files.source import resolve
from meshllm.model.locate import BUILTIN
from meshllm.model.modules.quant_linear import QuantLinear
from meshllm.model.steps.load import load_shard
from meshllm.names import Quant, Span

OWN = {"fuse_rms_norms", "pad_linears", "quantise", "replace_linears"}
"""What replaces modules."""


def test_loading_running_and_timing_replace_modules_in_one_place() -> None:
    root = Path(meshllm.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and OWN & {each.name for each in node.names}
    }

    assert users == {"model/modules/replacement.py"}


def test_a_quantised_shard_says_so_whatever_attention_it_has() -> None:
    shard = load_shard(resolve(BUILTIN), Span(1, 2), embed=False, head=False, quant=Quant.INT8)
    shard.model.config._attn_implementation = "sdpa"

    assert shard.quant is Quant.INT8
    assert any(isinstance(each, QuantLinear) for each in shard.model.modules())
