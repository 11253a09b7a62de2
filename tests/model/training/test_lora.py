"""Adapters by name, and what they add to linear modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshllm.errors import PeerFault
from meshllm.model.training.lora import (
    MAX_RANK,
    applied,
    layer_of,
    module_shape,
    pair_name,
    read_adapters,
)

NAME = pair_name(3, "self_attn.q_proj", 0)


def pair(rank: int = 2, width: int = 4, outputs: int = 6, name: str = NAME) -> dict[str, Tensor]:
    return {f"{name}.a": torch.randn(rank, width), f"{name}.b": torch.randn(outputs, rank)}


class Layer(nn.Module):
    """A layer with linear modules of both kinds, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 6)
        self.conv = Conv1D(6, 4)
        self.norm = nn.LayerNorm(4)


def test_a_name_says_which_layer_it_is_of() -> None:
    assert NAME == "lora.3.self_attn.q_proj.0"
    assert layer_of(f"{NAME}.a") == 3


def test_adapters_are_taken_by_layer_and_module_in_order() -> None:
    second = pair_name(3, "self_attn.q_proj", 1)
    other = pair_name(12, "mlp", 0)
    tensors = {**pair(name=second), **pair(), **pair(name=other), "hidden": torch.zeros(1)}

    found = read_adapters(tensors)

    assert [*tensors] == ["hidden"]
    assert {layer: [*modules] for layer, modules in found.items()} == {
        3: ["self_attn.q_proj"],
        12: ["mlp"],
    }
    assert [each.name for each in found[3]["self_attn.q_proj"]] == [NAME, second]


@pytest.mark.parametrize(
    "name", ["lora.x.mlp.0", "lora.3.0", "lora.3.mlp.x", "lora.3", "lora.", "lora.-1.mlp.0"]
)
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(PeerFault, match="Invalid name"):
        read_adapters(pair(name=name))


@pytest.mark.parametrize(
    "changes",
    [
        {"b": None},
        {"b": torch.randn(6, 3)},
        {"b": torch.randn(6)},
        {"a": torch.randn(2)},
        {"a": torch.zeros(2, 4, dtype=torch.int64)},
        {"a": torch.zeros(2, 4, dtype=torch.float64), "b": torch.zeros(6, 2, dtype=torch.float64)},
        {"a": torch.zeros(2, 4, dtype=torch.bfloat16)},
        {"a": torch.randn(0, 4), "b": torch.randn(6, 0)},
        {"a": torch.randn(MAX_RANK + 1, 1), "b": torch.randn(1, MAX_RANK + 1)},
    ],
)
def test_matrices_that_do_not_match_are_refused(changes: dict[str, Tensor | None]) -> None:
    whole = pair() | {f"{NAME}.{end}": each for end, each in changes.items()}
    tensors = {name: each for name, each in whole.items() if each is not None}

    with pytest.raises(PeerFault, match="do not match"):
        read_adapters(tensors)


@pytest.mark.parametrize("module", ["plain", "conv"])
def test_an_adapter_adds_to_a_product_while_it_is_applied(module: str) -> None:
    layer, x = Layer(), torch.randn(2, 4)
    names = [pair_name(0, module, number) for number in range(2)]
    tensors = pair(name=names[0]) | pair(name=names[1], rank=1)
    before = layer.get_submodule(module)(x)
    delta = sum(tensors[f"{each}.b"] @ tensors[f"{each}.a"] for each in names)

    with applied({0: layer}, read_adapters(dict(tensors))):
        found = layer.get_submodule(module)(x)

    torch.testing.assert_close(found, before + x @ torch.as_tensor(delta).T)
    assert torch.equal(layer.get_submodule(module)(x), before)


def test_an_adapter_computes_in_its_own_dtype_and_returns_that_of_the_module() -> None:
    layer, x = Layer().bfloat16(), torch.randn(2, 4, dtype=torch.bfloat16)
    tensors = pair(name=(name := pair_name(0, "plain", 0)))
    own = x.float() @ tensors[f"{name}.a"].T @ tensors[f"{name}.b"].T
    expected = (layer.plain(x) + own).bfloat16()

    with applied({0: layer}, read_adapters(tensors)):
        found = layer.plain(x)

    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("layer", "module", "options", "error"),
    [
        (1, "plain", {}, "not in the span"),
        (0, "missing", {}, "no linear module `missing`"),
        (0, "norm", {}, "no linear module `norm`"),
        (0, "plain.weight", {}, "no linear module"),
        (0, "__class__", {}, "no linear module"),
        (0, "x" * 1000, {}, "no linear module `x{100}`"),
        (0, "plain", {"width": 5}, "does not fit"),
        (0, "conv", {"outputs": 4}, "does not fit"),
    ],
)
def test_an_adapter_of_something_else_is_refused(
    layer: int, module: str, options: dict[str, Any], error: str
) -> None:
    whole = Layer()
    adapters = read_adapters(pair(name=pair_name(layer, module, 0), **options))

    with pytest.raises(PeerFault, match=error), applied({0: whole}, adapters):
        pass
    assert not whole.plain._forward_hooks


def test_only_linear_modules_have_a_shape() -> None:
    layer = Layer()

    shapes = [module_shape(each) for each in (layer.plain, layer.conv, layer.norm)]

    assert shapes == [(4, 6), (4, 6), None]


def test_a_number_of_a_layer_with_many_digits_is_refused() -> None:
    name = f"lora.{'9' * 5000}.mlp.0"

    with pytest.raises(PeerFault):
        read_adapters({f"{name}.a": torch.randn(2, 4), f"{name}.b": torch.randn(6, 2)})
