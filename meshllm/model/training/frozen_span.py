"""Layers of a stock model with frozen weights, through which hidden states and gradients flow.

Theory of operation
-------------------
A pass is a function of its batch alone: no KV cache, no parameters of a client. Forward maps the
hidden states before the span to those after it. Backward returns the gradients of the hidden states
and of the adapters; the weights have none. So several clients train at once.

The weights are those of the files, memory-mapped and neither packed nor quantised, beside those
that serve: the kernels that serve have no gradients.

Forward may keep what backward needs (the activations), while that fits into a part of the free
memory, measured from layer to layer. It returns a secret with which backward finds it, once. If it
is gone, or the node, backward takes the whole batch and computes forward again; what does not fit
even then it computes layer by layer: gradient checkpointing (arXiv 1604.06174).
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from meshllm.errors import Busy, PeerFault
from meshllm.model.device import CPU, free_bytes
from meshllm.model.files.source import Source
from meshllm.model.pauses import pause
from meshllm.model.shape import free_memory
from meshllm.model.split.rope import context_of
from meshllm.model.steps.load import load_shard
from meshllm.model.training.batch import HIDDEN, KEPT, Batch, pack, read_batch
from meshllm.model.training.lora import applied
from meshllm.names import Span

KEPT_PART = 4
"""The part of the free memory, as a divisor, that activations may take."""
KEPT_S = 600.0
"""s after which nobody will ask for activations any more."""
SECRET_BYTES = 16
MAX_CONTEXT = 1 << 20  # tokens of a sequence, if the model has no limit


class FrozenSpan:
    """Layers ``[start, stop)`` without the ends; used on one thread at a time."""

    def __init__(self, source: Source, span: Span, device: torch.device = CPU) -> None:
        """Load the layers; raise `ModelError` if weights are missing or damaged."""
        self.span = span
        self._shard = load_shard(source, span, embed=False, head=False, packed=False, device=device)
        self._shard.model.requires_grad_(False)
        self._context = context_of(source.config) or MAX_CONTEXT
        self._layers: dict[int, Any] = {
            each: self._shard.layer(each) for each in range(span.start, span.stop)
        }
        self._weights = {_storage(each) for each in self._shard.model.parameters()}
        self._activations = _Activations(0)
        self._kept = OrderedDict[bytes, _KeptPass]()
        for layer in self._layers.values():
            layer.forward = partial(self._run_layer, layer.forward)

    def forward(self, data: bytes, *, keeps: bool = False) -> bytes:
        """Return the hidden states [B, T, D] after the span, for a batch without a gradient.

        With ``keeps``, also the secret of what is kept for backward, if there is memory for it.

        Raises:
            PeerFault: the batch is invalid, see `batch`.
        """
        batch = self._read(data)
        if batch.hidden is None or batch.grad is not None:
            raise PeerFault("A batch that goes forward has hidden states and no gradient")
        inputs = _inputs(batch) if keeps else {}
        self._activations = _Activations(self._room())
        with torch.set_grad_enabled(keeps), applied(self._layers, batch.adapters):
            output = self._pass(batch)
        found = {HIDDEN: output}
        if keeps and self._activations.is_complete:
            secret = secrets.token_bytes(SECRET_BYTES)
            self._kept[secret] = _KeptPass(inputs, output, self._activations.size)
            found[KEPT] = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        return pack(found)

    def backward(self, data: bytes) -> bytes:
        """Return the gradients of the hidden states and adapters of a batch with a gradient.

        Raises:
            PeerFault: the batch is invalid, see `batch`.
            Busy: nothing is kept any more of a batch without hidden states.
        """
        batch = self._read(data)
        if batch.grad is None:
            raise PeerFault("A batch that goes backward has no gradient")
        if batch.hidden is None:
            if (kept := self._kept.pop(batch.kept, None)) is None:
                raise Busy("The activations of the batch are not kept any more")
            if batch.grad.shape != kept.output.shape:
                raise PeerFault("The gradient has another shape than the hidden states")
            return pack(_gradients(kept.output, kept.inputs, batch.grad))
        inputs = _inputs(batch)
        self._activations = _Activations(self._room(), recomputes=True)
        with torch.enable_grad(), applied(self._layers, batch.adapters):
            return pack(_gradients(self._pass(batch), inputs, batch.grad))

    def _room(self) -> int:
        """Return the bytes for activations of one more pass; forget the oldest if there are few."""
        is_cpu = self._shard.device == CPU
        free = free_memory() if is_cpu else free_bytes(self._shard.device)
        kept = sum(each.size for each in self._kept.values())
        room, now = (free + kept) // KEPT_PART, time.monotonic()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if 2 * kept <= room and now < oldest.since + KEPT_S:
                break
            kept -= self._kept.popitem(last=False)[1].size
        return room - kept

    def _read(self, data: bytes) -> Batch:
        rows = self._shard.row_format
        return read_batch(data, rows.width, self._context).on(self._shard.device)

    def _pass(self, batch: Batch) -> Tensor:
        assert batch.hidden is not None
        # A copy: some families change it in place.
        hidden = batch.hidden.to(self._shard.row_format.dtype, copy=True)
        return self._shard.run_sequences(hidden, batch.positions, batch.mask)

    def _run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer, with a pause before it, and backward one after it."""
        pause()
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        output = self._run_saving(forward, *args, **kwargs)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hook: Any = hidden.register_hook  # untyped
            hook(lambda _grad: pause())
        return output

    def _run_saving(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; save what backward needs, if there is room for it."""
        activations = self._activations
        if activations.is_full and activations.recomputes:
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
        if activations.is_full:
            activations.is_complete = False
            with torch.no_grad():
                return forward(*args, **kwargs)
        with activations.measured(self._weights):
            return forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _KeptPass:
    """What forward kept for backward."""

    inputs: dict[str, Tensor]
    """What has a gradient."""
    output: Tensor
    size: int
    """Bytes of the activations."""
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Activations:
    """What the layers of one pass save for backward."""

    room: int
    """Bytes."""
    recomputes: bool = False
    """Whether layers for which there is no room are computed again."""
    size: int = 0
    """Bytes so far."""
    is_complete: bool = True
    """Whether nothing is missing."""
    _largest: int = 0  # bytes of a layer

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another layer, if it saves as much as the largest."""
        return self.size + self._largest > self.room

    @contextmanager
    def measured(self, weights: Collection[int]) -> Iterator[None]:
        """Count what is saved inside the context, but not the weights."""
        saved = dict[int, int]()

        def note(tensor: Tensor) -> Tensor:
            if (at := _storage(tensor)) not in weights:
                saved[at] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # an output that its own node held would never be freed

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        size = sum(saved.values())
        self.size, self._largest = self.size + size, max(self._largest, size)


def _inputs(batch: Batch) -> dict[str, Tensor]:
    """Return what of a batch gets a gradient, by name."""
    assert batch.hidden is not None
    inputs = {HIDDEN: batch.hidden}
    for by_module in batch.adapters.values():
        for pair in (each for pairs in by_module.values() for each in pairs):
            inputs |= {f"{pair.name}.a": pair.a, f"{pair.name}.b": pair.b}
    for each in inputs.values():
        each.requires_grad_()
    return inputs


def _gradients(output: Tensor, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Return the gradients of what has any, as autograd does."""
    found = torch.autograd.grad(
        output, list(inputs.values()), grad.to(output.dtype), allow_unused=True
    )
    return {name: each for name, each in zip(inputs, found, strict=True) if each is not None}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
