"""A batch of whole sequences as bytes: what goes through frozen layers, and what comes back.

The bytes are those of a safetensors file in memory. Tensors by name::

    hidden           [B, T, D]       the hidden states before the first layer of the span
    grad             [B, T, D]       the gradient of the loss by those after it; only backward
    kept             [16]      uint8 the secret of what forward kept, instead of all but ``grad``
    mask             [B, T]    int64 0 for padding
    positions        [B, T]    int64 the position of each token; its index in the row by default
    <lora>.a, .b     [R, K], [N, R]  an adapter of a linear module, see `lora`

Back come the hidden states after the span as ``hidden``, with ``kept`` if they are to come back, or
the gradients under the same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from meshllm.errors import PeerFault
from meshllm.model.device import CPU, to_device
from meshllm.model.training.lora import Adapters, LoraPair, read_adapters

HIDDEN, GRAD, KEPT, MASK, POSITIONS = "hidden", "grad", "kept", "mask", "positions"
MAX_ROWS = 1 << 16
"""Tokens of a batch, padding included: a node computes them at once."""
MAX_TENSORS = 1 << 14
"""Tensors of a batch: 60 layers with 100 adapters each."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked batch."""

    hidden: Tensor | None
    """[B, T, D]; None if it is kept."""
    grad: Tensor | None
    """[B, T, D]; None forward."""
    mask: Tensor | None
    """[B, T], int64."""
    positions: Tensor | None
    """[B, T], int64."""
    adapters: Adapters
    kept: bytes = b""
    """The secret of what forward kept."""

    def on(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        if device == CPU:
            return self

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else to_device(x, device)

        adapters = {
            layer: {
                name: [
                    LoraPair(each.name, to_device(each.a, device), to_device(each.b, device))
                    for each in pairs
                ]
                for name, pairs in by_module.items()
            }
            for layer, by_module in self.adapters.items()
        }
        hidden, grad = moved(self.hidden), moved(self.grad)
        return Batch(hidden, grad, moved(self.mask), moved(self.positions), adapters, self.kept)


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as bytes."""
    host, storages = dict[str, Tensor](), set[int]()
    for name, each in tensors.items():
        own = each.detach().to("cpu").contiguous()
        storage = own.untyped_storage().data_ptr()
        host[name] = own.clone() if storage in storages else own  # safetensors wants them apart
        storages.add(storage)
    return safetensors.torch.save(host)


def unpack(data: bytes) -> dict[str, Tensor]:
    """Return the tensors in bytes; raise `PeerFault` if these are invalid or hold too many."""
    try:
        tensors = safetensors.torch.load(data)
    except SafetensorError as error:
        raise PeerFault(f"Invalid tensors of a batch: {error}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RuntimeError):  # of torch, with a trace
        raise PeerFault("Invalid tensors of a batch") from None
    if len(tensors) > MAX_TENSORS:
        raise PeerFault(f"Batch of {len(tensors)} tensors, more than {MAX_TENSORS}")
    return tensors


def read_batch(data: bytes, width: int, context: int) -> Batch:
    """Read and check a batch for layers of this width [D], of a model with this context.

    Raises:
        PeerFault: a tensor is missing, unknown, or of a wrong shape, dtype or range.
    """
    tensors = unpack(data)
    hidden, grad, kept = (tensors.pop(name, None) for name in (HIDDEN, GRAD, KEPT))
    if kept is not None and hidden is None and grad is not None and not tensors:
        if kept.dtype is not torch.uint8 or kept.dim() != 1 or grad.dtype not in _FLOATS:
            raise PeerFault("Invalid secret or gradient of a batch")
        return Batch(None, grad, None, None, {}, kept.numpy().tobytes())
    if kept is not None or hidden is None or hidden.dim() != 3 or hidden.dtype not in _FLOATS:
        raise PeerFault("Batch without floating-point hidden states [B, T, D]")
    sequences, length, own_width = hidden.shape
    if own_width != width:
        raise PeerFault(f"Hidden states of {own_width} values; the model has {width}")
    if not (sequences and 0 < length <= context and sequences * length <= MAX_ROWS):
        raise PeerFault(
            f"Batch of {sequences} sequences of {length} tokens; allowed are 1 to {context} tokens"
            f" each, and {MAX_ROWS} in all"
        )
    if grad is not None and (grad.shape != hidden.shape or grad.dtype not in _FLOATS):
        raise PeerFault(f"Gradient of shape {list(grad.shape)} for {list(hidden.shape)}")
    rows = sequences, length
    mask = _integers(tensors, MASK, rows, 2)
    positions = _integers(tensors, POSITIONS, rows, context)
    adapters = read_adapters(tensors)
    if tensors:
        raise PeerFault(f"Unknown tensor `{next(iter(tensors))[:100]}` in a batch")
    return Batch(hidden, grad, mask, positions, adapters)


def _integers(
    tensors: dict[str, Tensor], name: str, shape: tuple[int, int], limit: int
) -> Tensor | None:
    """Take a tensor of integers from 0 up to ``limit``, exclusive, that may be absent."""
    found = tensors.pop(name, None)
    if found is None:
        return None
    if tuple(found.shape) != shape or found.dtype is not torch.int64:
        raise PeerFault(f"`{name}` of shape {list(found.shape)}; expected int64 {list(shape)}")
    if not bool(((found >= 0) & (found < limit)).all()):
        raise PeerFault(f"`{name}` has values outside 0 to {limit - 1}")
    return found
