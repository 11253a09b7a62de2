"""A GPU that is none: tensors on meta have no values, so nobody can look at one without a copy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("meta")
ONCE = ["there", "back", "wait"]
"""The way of a job."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class Traffic(TorchDispatchMode):
    """Lists the ways there and back, and the waits; refuses to mix devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it open
        self.seen: list[str] = []

    def taken(self) -> list[str]:
        """Return what was seen, and forget it."""
        seen, self.seen = self.seen, []
        return seen

    def synchronize(self) -> None:
        self.seen.append("wait")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.pop("pin_memory", None):
            return torch.zeros(*args, **named)
        if func.overloadpacket is torch.ops.aten.copy_ and args[0].device != args[1].device:
            assert (args[0].device, args[2:]) == (torch.device("cpu"), (True,))
            self.seen.append("back")
            return args[0]
        before = _devices(args, named)
        assert len(before) < 2, f"{func} mixes devices"
        result = func(*args, **named)
        if before and _devices(result) - before:
            is_quick = named.get("non_blocking") or any(each is True for each in args)
            self.seen.append("there" if is_quick else "there, with a wait")
        return result


def _devices(*values: Any) -> set[torch.device]:
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return {tensor.device for tensor in tensors if tensor.dim()}


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Let the ways to a GPU lead to `GPU`."""
    traffic = Traffic()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _: traffic)
        patch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        with traffic:
            yield traffic
