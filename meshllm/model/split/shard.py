"""A contiguous part of a causal language model, run by its stock forward.

Theory of operation
-------------------
The whole model is the sequence (embed, layer 0, ..., layer L-1, head). A shard holds a contiguous
part of it; stubs replace the rest, at their global index. A hidden state enters as the output of
layer ``start - 1`` (as the input of layer 0 when ``start`` is 0) and leaves as the output of layer
``stop - 1`` (as the input of layer 0 when ``stop`` is 0), where the stock forward is aborted. What
the stock forward computes around the layers (masks, rotary tables) it computes in every shard, from
the same positions and lengths; so only the hidden state is sent.

A family whose layers share more than that (a second residual, the embeddings, keys of another
layer) gives wrong numbers here: `meshllm.model.parity.check` detects this before a user does.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshllm.errors import ModelError
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.meta_model import MetaModel, Part, row_dtype
from meshllm.model.split.rope import pin_frequencies
from meshllm.model.split.stubs import EndOfSpan, LayerStub, first, with_first
from meshllm.model.wire.payload import RowFormat
from meshllm.names import Quant


class Shard:
    """Layers ``[start, stop)`` with or without the ends; not thread-safe."""

    def __init__(
        self,
        meta_model: MetaModel,
        part: Part,
        device: torch.device,
        quant: Quant,
    ) -> None:
        self.span = part.span
        self.embed = part.embed
        self.head = part.head
        self.model = meta_model.model
        """The stock model, stripped; its modules may be replaced by faster ones."""
        pin_frequencies(self.model)
        self.device = device
        """The device of its weights, inputs and outputs."""
        self.quant = quant
        """The quantisation of its matrices."""
        self.outputs = meta_model.structure.outputs
        """Names of the modules after the layers."""
        self.arity = meta_model.structure.arity
        """How many values a layer returns; 0 is a bare tensor."""
        self._parts = meta_model.parts
        self._call = meta_model.structure.call
        self._input: Tensor | None = None
        self._entry_stub = _install_hooks(self, meta_model.parts)
        # Without a cache, stock code reads the positions to detect packed texts: a GPU sync.
        self._empty_cache = self.new_cache() if part.head and not part.span else None

    def new_cache(self) -> SpanCache:
        """Return an empty KV cache for one session."""
        return SpanCache(self.model.config, self.span)

    @property
    def row_format(self) -> RowFormat:
        """The format of the hidden states before and after layers."""
        config = self.model.config.get_text_config(decoder=True)
        return RowFormat(config.hidden_size, row_dtype(config, config.dtype))

    def layer(self, index: int) -> nn.Module:
        """Return a layer by its index in the whole model; a stub if it is outside the span."""
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
        """Run ``x`` after the tokens in the cache, and append it to the cache.

        ``x`` is token ids ``[B, T]``, int64, with the embedding; else the hidden state
        ``[B, T, D]`` before layer ``start``. Returns the logits ``[B, T, V]`` with the head, only
        of the last ``rows`` if given; else the hidden state ``[B, T, D]`` after the span.

        ``position_ids`` ``[B, T]`` continue those of the cache by default; ``attention_mask``
        ``[B, S + T]`` is 0 for padding. Without a cache, ``x`` is a whole sequence.
        """
        options = self._options(x, cache, position_ids, attention_mask)
        if rows is not None and self._call.logits_to_keep:
            options["logits_to_keep"] = rows
        hidden = self._run(x, options)
        if cache is not None:
            cache.length += x.shape[1]
        return hidden if rows is None or not self.head else hidden[:, -rows:]

    def run_sequences(
        self, x: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Run ``x`` as whole sequences without a cache, in the caller's grad mode.

        Else as `forward`.
        """
        return self._run(x, self._options(x, None, position_ids, attention_mask))

    @contextmanager
    def without_head(self) -> Iterator[None]:
        """Make `forward` return the last hidden state ``[B, T, D]`` instead of logits.

        It is the output of the base model. Where the stock forward does not call that (Llama 4,
        OPT), it is the input of the matrix that makes the logits.

        Raises:
            ModelError: the stock model does not say which matrix that is.
        """
        model = self.model
        base, matrix = model.base_model, model.get_output_embeddings()
        if matrix is None:
            raise ModelError(f"`{type(model).__name__}` has no hidden states apart from its logits")
        with ExitStack() as hooks:
            hooks.callback(matrix.register_forward_pre_hook(_stop_at_matrix).remove)
            if base is not model:
                hooks.callback(base.register_forward_hook(_stop_after_base).remove)
            yield

    def _options(
        self,
        x: Tensor,
        cache: SpanCache | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> dict[str, Any]:
        """Return the arguments of the stock forward, by the names of its signature."""
        call = self._call
        # A copy: some families scale their embeddings in place, and ``x`` enters only after that.
        given = {"input_ids": x} if self.embed else {"inputs_embeds": x.clone()}
        held = cache if cache is not None else self._empty_cache
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
        self._input = x
        if self._entry_stub is not None:
            self._entry_stub.hidden = x
        try:
            logits: Tensor = self.model(**options).logits
        except EndOfSpan as stop:
            return stop.hidden
        else:
            return logits
        finally:
            self._input = None
            if self._entry_stub is not None:
                self._entry_stub.hidden = None

    def _enter(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the hidden state that is passed to layer 0."""
        return with_first(args, kwargs, self._input)


def _install_hooks(shard: Shard, layers: nn.ModuleList) -> LayerStub | None:
    """Install the hooks where hidden states enter and leave; return the stub of entry, if any."""
    stub = None
    if not shard.embed and shard.span.start:
        before = layers[shard.span.start - 1]
        assert isinstance(before, LayerStub)
        stub = before
    elif not shard.embed:
        layers[0].register_forward_pre_hook(shard._enter, with_kwargs=True)
    if not shard.head and shard.span:
        layers[shard.span.stop - 1].register_forward_hook(_stop_after)
    elif not shard.head:
        layers[0].register_forward_pre_hook(_stop_before, with_kwargs=True)
    return stub


def _stop_after(_layer: nn.Module, _args: Any, output: Any) -> None:
    raise EndOfSpan(output[0] if isinstance(output, tuple) else output)


def _stop_after_base(_base: nn.Module, _args: Any, output: Any) -> None:
    raise EndOfSpan(output[0])


def _stop_at_matrix(_matrix: nn.Module, args: tuple[Any, ...]) -> None:
    raise EndOfSpan(args[0])


def _stop_before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise EndOfSpan(first(args, kwargs))
