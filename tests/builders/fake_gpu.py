"""A fake GPU: tensors on meta have no values, so none can be read without a copy."""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshllm.model.steps import cuda_graph
from meshllm.model.steps.attention import decode_attention

GPU = torch.device("meta")
ONCE = ["there", "back", "wait"]
"""The transfers of a job."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class Traffic(TorchDispatchMode):
    """Records transfers there and back, and waits; rejects mixed devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it open
        self.seen: list[str] = []

    def taken(self) -> list[str]:
        """Return the record, and clear it."""
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
    devices = set[torch.device]()
    for each in values:
        if isinstance(each, torch.Tensor):
            devices |= {each.device} if each.dim() else set()
        elif isinstance(each, (list, tuple)):  # what operators take; `tree_leaves` is slow
            devices |= _devices(*each)
        elif isinstance(each, dict):
            devices |= _devices(*each.values())
    return devices


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Redirect transfers to a GPU to `GPU`."""
    traffic = Traffic()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _: traffic)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
        patch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
        patch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
        patch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        with traffic:
            yield traffic


OTHER_CPU = torch.device("cpu", 0)
"""A device with values, different from the CPU that everything else is on."""


@contextmanager
def graphs_pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Make `OTHER_CPU` a fake GPU with attention that reads cache addresses from a table.

    Unlike a real graph, the fake one runs Python again, with the norms that the model has by then.
    """
    with pretended(monkeypatch) as traffic, monkeypatch.context() as patch:
        patch.setattr(cuda_graph, "_kernel", lambda: attend_by_table)
        patch.setattr(cuda_graph, "_capture", _again)
        patch.setattr(cuda_graph, "to_host", torch.clone)
        yield traffic


def attend_by_table(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, scale: float, window: int | None
) -> Tensor:
    """Do what `meshllm.model.kernels.triton_attention.attend` does, in host memory."""
    groups, rows = key.shape[1:3]
    mixed = query.new_zeros(1, rows, query.shape[1], value.shape[3])
    with _disable_current_modes():
        for row, (*addresses, room, place) in enumerate(table.tolist()):
            if place < 0:
                continue
            seen: list[Tensor] = []
            for address, new in zip(addresses, (key, value), strict=True):
                held = _tensor_at(address, (1, groups, room, new.shape[3]), new.dtype)
                held[:, :, place] = new[:, :, row]
                seen.append(held[:, :, : place + 1])
            own = query[:, :, row : row + 1]
            mixed[:, row] = decode_attention(own, seen[0], seen[1], scale, window)[:, 0]
    return mixed


def _tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _again(forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    output = forward().clone()

    def replay() -> None:  # whose transfers were recorded at the capture
        with _disable_current_modes():
            output.copy_(forward())

    return replay, output
