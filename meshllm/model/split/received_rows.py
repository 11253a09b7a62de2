"""Rows of a session's KV cache that another node hands over before it leaves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.split.kv_cache import Rows


class ReceivedRows:
    """Keys and values of one session by layer, and hidden states for the next rank."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Rows, ...]] = {}
        """Keys and values ``[1, H, T, D]`` of a layer, from position 0 on."""
        self.sent: dict[int, Rows] = {}
        """Hidden states ``[1, T, D]`` that entered a layer, likewise."""

    def join(self, other: "ReceivedRows") -> None:
        """Take over the rows of other layers of the same session."""
        self.layers |= other.layers
        self.sent |= other.sent

    def drop_sent_unlike(self, width: int, dtype: torch.dtype) -> None:
        """Drop hidden states unless they have this width and type."""
        self.sent = {
            layer: rows
            for layer, rows in self.sent.items()
            if (rows.buffer.shape[-1], rows.buffer.dtype) == (width, dtype)
        }

    def add(self, layer: int, pos: int, split: int, rows: Tensor) -> None:
        """Append rows ``[1, H, T, D]``: keys and values, which begin at ``split``.

        If that is 0, they are hidden states that entered the layer, with H = 1.

        Raises:
            ModelError: they do not continue the rows before them, which stay as they are.
        """
        if split:
            parts = rows.tensor_split((split,), -1)
            _append(self.layers.setdefault(layer, tuple(map(Rows, parts))), pos, parts)
        else:
            _append([self.sent.setdefault(layer, Rows(rows[:, 0]))], pos, [rows[:, 0]])


def _append(held: Sequence[Rows], pos: int, parts: Sequence[Tensor]) -> None:
    pairs = [*zip(held, parts, strict=True)]
    for rows, part in pairs:
        if rows.used != pos or rows.form != Rows(part).form:
            found = f"{part.dtype} rows of shape {list(part.shape)} at {pos}"
            raise ModelError(
                f"{found} do not continue {rows.used} rows of {list(rows.buffer.shape)}"
            )
    try:
        for rows, part in pairs:
            rows.extend(part.shape[-2])
            rows.write(part)
    except BaseException:
        for rows in held:
            rows.used = pos
        raise
