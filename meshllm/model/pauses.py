"""Pauses in long jobs on the compute thread, in which running answers compute their steps.

Loading, checking or timing a model takes a second or more. Such a job is a sequence of short parts,
and calls `pause` between two of them. Its caller sets with `pausing` what runs at each pause, which
may be anything but what the parts themselves do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_IN_PAUSE: ContextVar[Callable[[], None] | None] = ContextVar("in_pause", default=None)


def pause() -> None:
    """Let others compute, unless a default dtype or device is set, which they would take."""
    is_usual = (
        torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"
    )
    if (call := _IN_PAUSE.get()) is None or not is_usual:
        return
    with pausing(None), torch.inference_mode(False), torch.no_grad():
        call()


@contextmanager
def pausing(call: Callable[[], None] | None) -> Iterator[None]:
    """Call this in each pause inside the context; None is nothing."""
    token = _IN_PAUSE.set(call)
    try:
        yield
    finally:
        _IN_PAUSE.reset(token)
