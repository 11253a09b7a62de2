"""Memory that functions write again and again."""

import threading

import torch
from torch import Tensor


class _Scratch(threading.local):
    """Memory of a thread: new pages would take longer to come."""

    numbers = torch.empty(0, dtype=torch.bfloat16)


_scratch = _Scratch()


def scratch(count: int) -> Tensor:
    """Lend room for so many bfloat16 numbers, until the same thread asks again."""
    if len(_scratch.numbers) < count:
        _scratch.numbers = torch.empty(count, dtype=torch.bfloat16)
    return _scratch.numbers[:count]
