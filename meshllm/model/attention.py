"""Attention of a few new rows that gives each the same bits in any company; knows no model.

Theory of operation: products and sums over one row's keys are made by kernels whose order of adding
may depend on how many rows, or keys, there are. Keys are taken in blocks of fixed places, `BLOCK`
long, within which kernels keep to one order; keys that a row must not see get the weight 0, which
changes no sum. Whether the processor at hand keeps to it is tried once for each shape, with values
that cancel each other out, so that only the rounding of the order is left; where it does not, the
rows are computed one after the other.

Scores are rounded to the dtype of the keys, as transformers' eager attention does it. For a few
rows this is faster than the fused kernel, which packs every key for every head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 1024  # keys
_LENGTHS = (*range(1, 36), 200, BLOCK - 10, BLOCK + 1, 2 * BLOCK - 10)
"""Keys with which they are tried: few, odd, over the edge of a block within the rows."""
SCORE_BYTES = 2 << 20  # of the scores that are made at a time
_LANES = 16  # values that a processor adds at once; of a part of them the order is another


class RowAttention:
    """Attends, and remembers for which shapes rows may go together."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Expect these numbers of rows, each less than ``BLOCK``; others go one by one."""
        self._counts = counts
        self._may_share: dict[tuple[object, ...], bool] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attend with the last T places; no row sees what is behind its own.

        query [1, H, T, D], key [1, G, S, D] and value [1, G, S, E] with H a multiple of G; the
        result is [1, T, H, E]. ``window`` is how many keys a row sees, its own included.
        """
        rows, keys = query.shape[2], key.shape[2]
        slides = window is not None and keys > window
        if rows == 1 and not slides:
            return _attend(query, key, value, scale)
        if rows in self._counts and not slides and self._shares(query, key, value):
            return _attend(query, key, value, scale)
        attended = []
        for row in range(rows):
            stop = keys - rows + row + 1
            seen = slice(max(0, stop - window) if window else 0, stop)
            one = query[:, :, row : row + 1]
            attended.append(_attend(one, key[:, :, seen], value[:, :, seen], scale))
        return torch.cat(attended, 1)

    def _shares(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        kind = query.shape[1], *key.shape[1::2], value.shape[3], key.dtype, torch.get_num_threads()
        if kind not in self._may_share:
            heads, groups, width, width_out, dtype, _ = kind
            self._may_share[kind] = all(
                _agree(heads, groups, width, width_out, dtype, keys, self._counts)
                for keys in _LENGTHS
            )
        return self._may_share[kind]


def attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attend with many rows at the end of a text, as `RowAttention.attend`, each as it comes.

    The fused kernel of torch takes twice as long where keys stand before the rows: it does not
    skip what is hidden, and stock code copies keys for every head. Here some rows at a time see
    what they see, as many as leave their scores in the processor's cache; and scores stand as
    the product with the keys gives them, a column for each row, so that nothing is turned.
    """
    heads, rows, width = query.shape[1:]
    groups, keys = key.shape[1:3]
    each, past = heads // groups, keys - rows
    mixed = query.new_empty(1, rows, heads, value.shape[3])
    later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril_(-1)
    most = max(1, SCORE_BYTES // (query.element_size() * heads * keys))
    for at in range(0, rows, most):
        count = min(most, rows - at)
        stop = past + at + count
        start = max(0, stop - count - window + 1) if window else 0
        asked = (query[:, :, at : at + count] * scale).reshape(groups, each * count, width)
        scores = torch.matmul(key[0, :, start:stop], asked.transpose(1, 2))  # [G, S, H/G * T]
        by_row = scores.view(groups, stop - start, each, count)
        by_row[:, -count:].masked_fill_(later[:count, None, :count], -torch.inf)
        if window:
            gone = _forgotten(count, stop - start, window, query.device)
            by_row.masked_fill_(gone[:, None], -torch.inf)
        shares = scores.softmax(1).transpose(1, 2)
        part = torch.matmul(shares, value[0, :, start:stop])
        mixed[0, at : at + count] = part.view(heads, count, -1).transpose(0, 1)
    return mixed


def _forgotten(rows: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Mark the keys [S, T] that have left the window of each of the last rows."""
    places = torch.arange(keys, device=device)
    return places[-rows:] - places[:, None] >= window


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    heads, rows, width = query.shape[1:]
    groups, keys = key.shape[1:3]
    each = heads // groups
    # Keys on the left: the other way round the kernel would copy all of them to turn them.
    asked = query.reshape(groups, each * rows, width).transpose(1, 2)
    scores = torch.matmul(key[0], asked).transpose(1, 2).float()  # [G, H/G * T, S]
    scores = scores.mul_(scale).view(groups, each, rows, keys)
    if rows > 1:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=scores.device)
        scores.masked_fill_(seen.triu_(keys - rows + 1), -torch.inf)
    scores = functional.pad(scores, (0, -keys % _LANES), value=-torch.inf)
    shares = scores.softmax(-1)[..., :keys].to(value.dtype).reshape(groups, each * rows, keys)
    parts = [
        torch.matmul(shares[..., at : at + BLOCK], value[0, :, at : at + BLOCK])
        for at in range(0, keys, BLOCK)
    ]
    mixed = parts[0] if len(parts) == 1 else _sum(parts)
    return mixed.view(groups, each, rows, -1).permute(2, 0, 1, 3).reshape(1, rows, heads, -1)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _agree(  # noqa: PLR0913 -- a shape has as many numbers
    heads: int,
    groups: int,
    width: int,
    width_out: int,
    dtype: torch.dtype,
    keys: int,
    counts: Sequence[int],
) -> bool:
    """Try rows together and alone on values of which each stands there twice, once negative."""
    generator = torch.Generator().manual_seed(0)
    most = max(counts)
    half = (keys + most) // 2
    query = torch.randn(1, heads, most, width, generator=generator).to(dtype)
    key = torch.randn(1, groups, keys + most, width, generator=generator).to(dtype)
    value = torch.randn(1, groups, keys + most, width_out, generator=generator).to(dtype)
    key[:, :, half : 2 * half] = key[:, :, :half]
    value[:, :, half : 2 * half] = -value[:, :, :half]

    def attend(start: int, stop: int) -> Tensor:
        seen = slice(keys + stop)
        return _attend(query[:, :, start:stop], key[:, :, seen], value[:, :, seen], width**-0.5)

    alone = torch.cat([attend(row, row + 1) for row in range(most)], 1)
    return all(torch.equal(attend(0, count), alone[:, :count]) for count in counts)
