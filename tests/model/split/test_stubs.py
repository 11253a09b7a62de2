"""Stubs take no memory and have the attributes of the modules they replace."""

import pytest
import torch
from torch import nn

from meshllm.model.split.stubs import EndStub, LayerStub, ProjectionStub, first, with_first

HIDDEN = torch.ones(1, 2, 4)


@pytest.mark.parametrize(("arity", "rest"), [(1, ()), (2, (None,)), (3, (None, None))])
def test_a_layer_returns_as_many_values_as_its_family(arity: int, rest: tuple[None]) -> None:
    hidden, *others = LayerStub(nn.Identity(), arity)(HIDDEN, "mask")

    assert hidden is HIDDEN
    assert tuple(others) == rest


def test_a_layer_may_return_a_bare_tensor() -> None:
    assert LayerStub(nn.Identity(), 0)(hidden_states=HIDDEN, mask=None) is HIDDEN


def test_a_layer_returns_the_hidden_state_it_was_given() -> None:
    stub = LayerStub(nn.Identity(), 0)
    stub.hidden = HIDDEN * 2

    assert torch.equal(stub(HIDDEN), HIDDEN * 2)


def test_a_stub_has_the_attributes_of_its_module_but_not_its_parameters() -> None:
    layer = nn.Linear(4, 4)
    stub = LayerStub(layer, 0)

    assert stub.in_features == 4
    assert stub.weight is layer.weight
    assert not list(stub.parameters())
    assert not stub.state_dict()
    with pytest.raises(AttributeError, match="nothing"):
        _ = stub.nothing


def test_an_embedding_becomes_a_zero_that_broadcasts() -> None:
    stub = EndStub(nn.Embedding(3, 4, dtype=torch.bfloat16))

    assert torch.equal(HIDDEN + stub(torch.ones(1, 2)), HIDDEN)
    assert stub(torch.ones(1, 2)).ndim == HIDDEN.ndim
    assert stub(torch.tensor([[1]])).dtype is torch.bfloat16


def test_a_norm_or_projection_returns_the_hidden_state() -> None:
    assert EndStub(nn.Linear(4, 8))(None, HIDDEN) is HIDDEN


def test_a_linear_module_whose_products_nobody_needs_gives_zeros_of_their_shape() -> None:
    products = ProjectionStub(nn.Linear(4, 8))(torch.ones(2, 3, 4))

    assert torch.equal(products, torch.zeros(2, 3, 8))


def test_the_hidden_state_is_the_first_argument_or_the_keyword_of_that_name() -> None:
    assert first((HIDDEN, None), {}) is HIDDEN
    assert first((), {"mask": None, "hidden_states": HIDDEN}) is HIDDEN


def test_another_hidden_state_replaces_that_of_a_layer() -> None:
    other = HIDDEN * 2

    assert with_first((HIDDEN, "mask"), {"x": 1}, other) == ((other, "mask"), {"x": 1})
    assert with_first((), {"hidden_states": HIDDEN, "x": 1}, other) == (
        (),
        {"hidden_states": other, "x": 1},
    )
