"""The instruction for pairs of bfloat16: what it adds up to, and when it is gone without."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshllm.model import native, native_pairs
from meshllm.model.native_pairs import adds_pairs, pairs_pay


@pytest.fixture
def _anew() -> Iterator[None]:
    """Forget what is known of the processor, before and after."""
    known = adds_pairs, pairs_pay
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


@pytest.mark.usefixtures("_anew")
def test_a_processor_without_it_has_none_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "can", lambda *_: False)

    assert not adds_pairs()
    assert not pairs_pay()


@pytest.mark.skipif(not adds_pairs(), reason="this processor adds no pairs")
def test_pairs_are_added_in_the_order_of_single_numbers() -> None:
    def added(*, in_pairs: bool) -> Tensor:
        numbers = given.clone()
        native_pairs._adder(in_pairs=in_pairs)(1, 1, numbers.data_ptr(), 3)
        return numbers

    drawn = torch.randn(18 * 32, generator=torch.Generator().manual_seed(4))
    given = drawn.bfloat16().view(torch.float32)

    assert torch.equal(added(in_pairs=True), added(in_pairs=False))
    assert added(in_pairs=True).isfinite().all()
    assert not torch.equal(added(in_pairs=True), given)


@pytest.mark.skipif(not adds_pairs(), reason="this processor adds no pairs")
@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("seconds", [(1.0, 2.0), (1.0, 1.26), (1.0, 1.24), (1.0, 0.5)], ids=str)
def test_it_pays_where_it_is_not_clearly_slower(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float]
) -> None:
    clock, single, pair = 0.0, *seconds

    def adder(*, in_pairs: bool) -> object:
        def function(*_: int) -> None:
            nonlocal clock
            clock += pair if in_pairs else single

        return function

    monkeypatch.setattr(native_pairs, "_adder", adder)
    monkeypatch.setattr(native_pairs, "perf_counter", lambda: clock)

    assert pairs_pay() == (pair < 1.25)
