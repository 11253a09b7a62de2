"""Causal softmax over columns: visible keys, hidden keys, and NaN."""

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels import jit
from meshllm.model.kernels.softmax import COLUMNS, causal_softmax_


def draw(groups: int, keys: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(keys)
    return (8 * torch.randn(groups, keys, columns, generator=generator)).to(dtype)


def expected(scores: Tensor, rows: int, window: int | None) -> Tensor:
    """Compute it with a mask, in float64."""
    keys = scores.shape[1]
    places = keys - rows + torch.arange(scores.shape[2]) % rows
    behind = places - torch.arange(keys)[:, None]
    hidden = (behind < 0) | (behind >= (window or keys))
    return scores.double().masked_fill(hidden, -torch.inf).softmax(1)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute it, too, as where no memory can be made executable."""
    if request.param == "torch":
        monkeypatch.setattr(jit, "jit_available", lambda: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(
    ("keys", "rows", "columns"),
    [
        (1, 1, COLUMNS),
        (40, 1, COLUMNS),
        (40, 40, 4 * COLUMNS),
        (40, 40, 9 * COLUMNS),
        (100, 17, 8 * COLUMNS),
    ],
)
def test_a_row_is_the_softmax_of_the_keys_it_sees(
    keys: int, rows: int, columns: int, window: int | None, dtype: torch.dtype
) -> None:
    scores = draw(3, keys, columns, dtype)
    exact = expected(scores, rows, window)

    causal_softmax_(scores, rows, window)

    assert torch.equal(scores == 0, exact == 0)
    assert (scores - exact).abs().max() < (0.006 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("size", [1e4, 3e38])
def test_large_scores_do_not_overflow(size: float) -> None:
    scores = draw(1, 30, COLUMNS, torch.float32).clamp(-1, 1) * size
    exact = expected(scores, 30, None)

    causal_softmax_(scores, 30)

    assert torch.allclose(scores.double(), exact, atol=1e-6)


def test_a_window_longer_than_the_keys_hides_nothing() -> None:
    scores = draw(1, 5, COLUMNS, torch.float32)
    other = scores.clone()

    causal_softmax_(scores, 1, 2**32)
    causal_softmax_(other, 1)

    assert torch.equal(scores, other)


def test_a_column_has_the_same_bits_with_any_number_of_threads() -> None:
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            scores = draw(4, 200, 4 * COLUMNS, torch.bfloat16)
            causal_softmax_(scores, 100)
            found.append(scores)
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(*found)


def test_nan_affects_only_its_column() -> None:
    scores = draw(1, 10, COLUMNS, torch.float32)
    scores[0, 2, 5] = torch.nan
    scores[0, 9, 4] = torch.nan  # no row of this column sees it

    causal_softmax_(scores, 10)

    assert scores[0, :6, 5].isnan().all()
    assert scores.isnan().any(1).sum() == 1


def test_invalid_scores_are_refused() -> None:
    for scores, rows in (
        (torch.zeros(1, 4, COLUMNS - 1), 2),
        (torch.zeros(1, 4, COLUMNS), 5),
        (torch.zeros(1, 4, COLUMNS), 0),
        (torch.zeros(1, 4, COLUMNS, dtype=torch.float16), 2),
    ):
        with pytest.raises(ValueError, match="softmax of"):
            causal_softmax_(scores, rows)
    with pytest.raises(ValueError, match="must be contiguous"):
        causal_softmax_(torch.zeros(1, COLUMNS, 64).transpose(1, 2)[:, :, :COLUMNS], 2)
