"""Which modules are quantised, which stay plain, and which are grouped."""

import torch
from torch import nn

from meshllm.model.modules.quant_choice import choose, fusable_groups
from meshllm.names import Quant


class Attention(nn.Module):
    def __init__(self, width: int = 64, inputs: int = 64) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, width)
        self.k_proj = nn.Linear(inputs, 32)
        self.v_proj = nn.Linear(64, 32)
        self.o_proj = nn.Linear(64, 64)


class Special(nn.Linear):
    pass


def test_every_supported_linear_module_is_chosen() -> None:
    model = nn.ModuleDict(
        {"a": Attention(), "odd": nn.Linear(60, 16), "table": nn.Embedding(9, 64)}
    )

    linears, plain = choose(model, Quant.INT4, [])

    assert list(linears) == ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"]
    assert [(p.name, p.shape, p.reason) for p in plain] == [
        ("odd", (16, 60), "60 inputs are not a multiple of 64")
    ]
    assert not plain[0].lossy


def test_skipped_modules_are_not_reported() -> None:
    model = nn.ModuleDict({"a": Attention(), "ab": nn.Linear(64, 64), "odd": nn.Linear(60, 16)})

    linears, plain = choose(model, Quant.INT4, ["a", "odd"])

    assert list(linears) == ["ab"]
    assert plain == []


def test_a_module_whose_replacement_would_lose_something_stays_plain() -> None:
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    with torch.device("meta"):
        absent = nn.Linear(64, 64)
    model = nn.ModuleDict({"special": Special(64, 64), "hooked": hooked, "absent": absent})

    linears, plain = choose(model, Quant.INT8, [])

    assert linears == {}
    assert [p.reason for p in plain] == ["it is a Special", "it has hooks", "it is on meta"]


def test_stacked_experts_are_reported() -> None:
    model = nn.Module()
    model.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 64))
    model.convolution = nn.Parameter(torch.zeros(64, 1, 4))

    _, plain = choose(model, Quant.INT8, [])

    assert [(p.name, p.shape) for p in plain] == [("gate_up_proj", (4, 32, 64))]


def test_query_key_and_value_are_grouped() -> None:
    linears, _ = choose(nn.ModuleDict({"a": Attention(), "b": Attention()}), Quant.INT8, [])

    assert list(fusable_groups(linears)) == [
        ("a.q_proj", "a.k_proj", "a.v_proj"),
        ("a.o_proj",),
        ("b.q_proj", "b.k_proj", "b.v_proj"),
        ("b.o_proj",),
    ]


def test_modules_with_different_inputs_are_not_grouped() -> None:
    linears, _ = choose(Attention(inputs=128), Quant.INT8, [])

    assert list(fusable_groups(linears)) == [("q_proj",), ("k_proj",), ("v_proj",), ("o_proj",)]


def test_a_group_with_a_missing_module_is_split() -> None:
    model = Attention()
    model.q_proj = nn.Linear(60, 64)

    linears, _ = choose(model, Quant.INT4, [])

    assert list(fusable_groups(linears)) == [("k_proj",), ("v_proj",), ("o_proj",)]
