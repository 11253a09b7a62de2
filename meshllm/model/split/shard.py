"""A contiguous part of a causal language model, run by its stock forward.

Theory of operation
-------------------
The whole model is the sequence (embed, layer 0, ..., layer L-1, head). A shard holds a contiguous
part of it; stubs stand for the rest, at their global index. A hidden state enters as the output of
layer ``start - 1`` (as the input of layer 0 when ``start`` is 0) and leaves as the output of layer
``stop - 1`` (as the input of layer 0 when ``stop`` is 0), where the stock forward is cut off. What
the stock forward makes around the layers (masks, rotary tables) it makes in every shard, from the
same positions and lengths; so nothing but the hidden state has to travel.

A family whose layers share more than that (a second residual, the embeddings, keys of another
layer) gives wrong numbers here: `meshllm.model.parity.check` finds out before a user does.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshllm.model.device import CPU
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.rope import hold
from meshllm.model.split.skeleton import Part, Skeleton
from meshllm.model.split.stubs import LayerStub, Stop, first, key
from meshllm.names import Quant


class Shard:
    """Layers ``[start, stop)`` with or without the ends; one thread at a time runs it."""

    def __init__(
        self,
        skeleton: Skeleton,
        part: Part,
        device: torch.device = CPU,
        quant: Quant = Quant.NONE,
    ) -> None:
        self.span = part.span
        self.embed = part.embed
        self.head = part.head
        self.layers = skeleton.layers
        """Of the whole model."""
        self.model = skeleton.model
        """The stock model, stripped; its modules may be exchanged for faster ones."""
        hold(self.model)
        self.device = device
        """Where its weights are, and where it takes and gives rows."""
        self.quant = quant
        """How its matrices are held."""
        self.outputs = skeleton.anatomy.outputs
        """Names of the modules behind the layers."""
        self.arity = skeleton.anatomy.arity
        """How many values a layer returns; 0 is a bare tensor."""
        self._parts = skeleton.parts
        self._call = skeleton.anatomy.call
        self._entering: Tensor | None = None
        self._gate = _open_gates(self, skeleton.parts)
        # Without a cache stock code looks into the positions for packed texts: a wait, on a GPU.
        self._no_states = self.new_cache() if part.head and not part.span else None

    def new_cache(self) -> SpanCache:
        """Make an empty cache for one session."""
        return SpanCache(self.model.config, self.span)

    def layer(self, index: int) -> nn.Module:
        """Give a layer by its index in the whole model; a stub stands for one of another span."""
        return self._parts[index]

    @torch.inference_mode()
    def forward(
        self,
        x: Tensor,
        cache: SpanCache | None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """Run ``x`` behind what the cache holds, and count it there.

        ``x`` is token ids ``[B, T]``, int64, with the embedding; else the hidden state
        ``[B, T, D]`` before layer ``start``. Returns the logits ``[B, T, V]`` with the head, of
        the last ``rows`` only where given; else the hidden state ``[B, T, D]`` after the span.

        ``position_ids`` ``[B, T]`` go on from the cache by default; ``attention_mask``
        ``[B, S + T]`` is 0 where a row is padding. Without a cache, ``x`` is a whole sequence.
        """
        options = self._options(x, cache, position_ids, attention_mask)
        if rows is not None and self._call.logits_to_keep:
            options["logits_to_keep"] = rows
        hidden = self._run(x, options)
        if cache is not None:
            cache.length += x.shape[1]
        return hidden if rows is None or not self.head else hidden[:, -rows:]

    def _options(
        self,
        x: Tensor,
        cache: SpanCache | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> dict[str, Any]:
        """Say what the stock forward is to do, in the words of its own signature."""
        call = self._call
        # A copy: some families scale their embeddings in place, and ``x`` enters only after that.
        given = {"input_ids": x} if self.embed else {"inputs_embeds": x.clone()}
        held = cache if cache is not None else self._no_states
        options: dict[str, Any] = {call.cache: held, "use_cache": held is not None, **given}
        if call.position_ids:
            if position_ids is None:
                start = cache.length if cache is not None else 0
                position_ids = torch.arange(start, start + x.shape[1], device=x.device)[None]
            options["position_ids"] = position_ids
        if attention_mask is not None and call.attention_mask and (self.embed or self.span):
            options["attention_mask"] = attention_mask
        return options

    def _run(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        """Run the stock forward from where ``x`` enters to where the span ends."""
        self._entering = x
        if self._gate is not None:
            self._gate.hidden = x
        try:
            logits: Tensor = self.model(**options).logits
        except Stop as stop:
            return stop.hidden
        else:
            return logits
        finally:
            self._entering = None
            if self._gate is not None:
                self._gate.hidden = None

    def _enter(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the hidden state that comes to layer 0."""
        if args:
            return (self._entering, *args[1:]), kwargs
        return args, kwargs | {key(kwargs): self._entering}


def _open_gates(shard: Shard, layers: nn.ModuleList) -> LayerStub | None:
    """Let hidden states in and out; return the stub that lets them in, where it is one."""
    gate = None
    if not shard.embed and shard.span.start:
        gate = layers[shard.span.start - 1]
    elif not shard.embed:
        layers[0].register_forward_pre_hook(shard._enter, with_kwargs=True)
    if not shard.head and shard.span:
        layers[shard.span.stop - 1].register_forward_hook(_stop_after)
    elif not shard.head:
        layers[0].register_forward_pre_hook(_stop_before, with_kwargs=True)
    return gate if isinstance(gate, LayerStub) else None


def _stop_after(_layer: nn.Module, _args: Any, output: Any) -> None:
    raise Stop(output[0] if isinstance(output, tuple) else output)


def _stop_before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise Stop(first(args, kwargs))
