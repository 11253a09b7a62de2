"""Scratch memory that kernels reuse, one buffer per thread."""

import threading

import torch
from torch import Tensor


class _Scratch(threading.local):
    """The buffer of a thread; new pages would cost page faults."""

    numbers = torch.empty(0, dtype=torch.bfloat16)


_scratch = _Scratch()


def scratch(count: int) -> Tensor:
    """Return a buffer of ``count`` bfloat16 numbers, valid until this thread's next call."""
    if len(_scratch.numbers) < count:
        _scratch.numbers = torch.empty(count, dtype=torch.bfloat16)
    return _scratch.numbers[:count]
