"""Matrices whose rows do not depend on each other's company."""

import pytest
import torch
from torch import nn

from meshllm.model.packed import PackedLinear
from meshllm.model.steady import SteadyLinear, steady

COUNTS = (1, 2, 3, 5, 9, 17)


class Moody(PackedLinear):
    """Adds up few rows in another order than more: the effect, on any processor."""

    floor = 3

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- of the base
        products = input[..., None, :] * self.weight  # [..., N, K]
        halves = products.chunk(2, -1)
        if input.shape[-2] < self.floor:
            halves = products[..., ::2], products[..., 1::2]
        return halves[0].sum(-1) + halves[1].sum(-1)


class Moodier(Moody):
    floor = 5


class Own(nn.Linear):
    pass


def model_of(kind: type[Moody]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(nn.Linear(96, 40, bias=False)))


def test_a_matrix_that_minds_few_rows_gets_more() -> None:
    model = model_of(Moody)
    x = torch.randn(1, 17, 96)
    before = model(x)

    assert steady(model, COUNTS)

    assert isinstance(model[0], SteadyLinear)
    assert model[0].floor == 3
    assert torch.equal(model(x), before)
    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), before[:, :rows])


def test_where_more_rows_do_not_help_nothing_is_changed() -> None:
    model = model_of(Moodier)

    assert not steady(model, COUNTS)
    assert type(model[0]) is Moodier


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (96, 256), (2048, 64), (33, 7)])
def test_rows_are_the_same_in_any_company_where_it_is_said(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(inputs, outputs, dtype=dtype))
    if not steady(model, COUNTS):
        pytest.skip(f"this processor has no such kernel for {inputs} x {outputs} in {dtype}")
    x = torch.randn(1, 17, inputs).to(dtype)
    x[..., inputs // 2 : inputs // 2 * 2] = -x[..., : inputs // 2]  # the sums are their rounding

    whole = model(x)

    for rows in COUNTS:
        assert torch.equal(model(x[:, :rows]), whole[:, :rows]), rows


def test_of_a_linear_module_of_the_model_s_own_nothing_is_known() -> None:
    assert not steady(nn.Sequential(Own(96, 40, dtype=torch.bfloat16)), COUNTS)


def test_weight_and_bias_are_where_stock_code_looks_for_them() -> None:
    plain = nn.Linear(8, 4)
    linear = SteadyLinear(plain, 2)

    assert linear.weight is plain.weight
    assert linear.bias is plain.bias
