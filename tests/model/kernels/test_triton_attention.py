"""Attention on a GPU, compared with float32 attention row by row."""

import pytest
import torch
from torch import Tensor

from meshllm.model.device import choose
from tests.builders.fake_gpu import needs_gpu


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "width", "width_out", "window"),
    [(4, 2, 16, 16, None), (6, 2, 24, 24, 7), (16, 8, 128, 128, None), (4, 1, 80, 48, 33),
     (8, 1, 256, 256, None)],
)  # fmt: skip
def test_rows_attend_to_the_caches_in_the_table(
    dtype: torch.dtype, heads: int, groups: int, width: int, width_out: int, window: int | None
) -> None:
    from meshllm.model.kernels.triton_attention import attend  # Triton is installed only with a GPU

    gpu, generator = choose("cuda", dtype), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(gpu, dtype)

    sessions = ((0, 1), (1, 1), (5, 2), (40, 3), (300, 1), (1000, 2))
    rows = sum(count for _, count in sessions) + 1
    query, key, value = (
        draw(1, rows, count, size).transpose(1, 2)
        for count, size in ((heads, width), (groups, width), (groups, width_out))
    )
    entries: list[list[int]] = []
    held, expected = [], []
    for length, count in sessions:
        own = slice(len(entries), len(entries) + count)
        buffers = [draw(1, groups, length + 8, size) for size in (width, width_out)]
        for buffer in buffers:
            buffer[:, :, length:] = float("nan")
        held.append(buffers)
        seen = [
            torch.cat([buffer[:, :, :length], new[:, :, own]], 2)
            for buffer, new in zip(buffers, (key, value), strict=True)
        ]
        expected.append(attend_plainly(query[:, :, own], seen[0], seen[1], window))
        addresses = [buffer.data_ptr() for buffer in buffers]
        entries += [[*addresses, length + 8, length + row] for row in range(count)]
    table = torch.tensor([*entries, [0, 0, 0, -1]], device=gpu)

    mixed = attend(query, key, value, table, 0.3, window)

    assert mixed[:, -1].eq(0).all()
    limit = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(
        mixed[:, :-1].float(), torch.cat(expected, 1), atol=limit, rtol=limit
    )
    at = 0
    for (length, count), buffers in zip(sessions, held, strict=True):
        for buffer, new in zip(buffers, (key, value), strict=True):
            assert torch.equal(buffer[:, :, length : length + count], new[:, :, at : at + count])
            assert buffer[:, :, length + count :].isnan().all()
        at += count


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of the last rows in float32: [1, T, H, E]."""
    each = query.shape[1] // key.shape[1]
    key, value = (held.float().repeat_interleave(each, 1) for held in (key, value))
    scores = query.float() @ key.transpose(2, 3) * 0.3
    rows, keys = scores.shape[2:]
    behind = torch.arange(keys)[None] - torch.arange(keys - rows, keys)[:, None]
    hidden = (behind > 0) | (behind <= -(window or keys + 1))
    return (
        scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1) @ value
    ).transpose(1, 2)
