"""Steps of a shard on a GPU, captured in one CUDA graph.

Theory of operation: a step of a few rows is hundreds of small kernels, and launching one from
Python takes longer than the GPU needs to run it. So a whole step is captured in a CUDA graph. It
always has the same number of rows, padding included, as the time goes into reading the weights: so
there is one graph, and a row has the same bits whatever the other rows are, because the kernels
never change. What differs from step to step comes in one int64 tensor: tokens, positions, and the
cache addresses of each row, see `meshllm.model.kernels.triton_attention`.

What a forward reads on the host, from tensors or from its cache, is not in the graph: such a
forward is `NotReplayable`, which is checked before and after the capture.
"""

import threading
from collections.abc import Callable, Sequence
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshllm.model.device import to_device, to_host
from meshllm.model.modules.rms_norm import fused
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.shard import Shard
from meshllm.model.steps.trace import NotReplayable

Forward = Callable[[Tensor, SpanCache | None, Tensor], Tensor]
"""Runs rows with a cache, at positions [1, T]; its attention has to be `Graph.attend`."""

_FIELDS = 4  # of a row in the table of caches
_FAR = 100_000  # tokens; a cache length that no trial has
_UNTRACEABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_one_at_a_time = threading.Lock()  # per capture, which may forbid what other threads do


class Graph:
    """The captured step of a shard."""

    def __init__(self, shard: Shard, width: int) -> None:
        """Allocate the inputs of a step of ``width`` rows."""
        config, device = shard.model.config.get_text_config(decoder=True), shard.device
        self.width = width
        self._shard = shard
        self._attend = _kernel()
        self._layers = list(range(shard.span.start, shard.span.stop))
        count = (2 + len(self._layers) * _FIELDS) * width
        self._blank = torch.zeros(count, dtype=torch.int64)
        self._split(self._blank)[2][..., -1] = -1
        self._numbers = self._blank.to(device)
        tokens, self._places, self._tables = self._split(self._numbers)
        hidden = torch.zeros(1, width, config.hidden_size, dtype=shard.model.dtype, device=device)
        self._x = tokens if shard.embed else hidden
        self._empty: dict[int, tuple[Tensor, Tensor]] = {}  # empty keys and values, by layer
        self._updated: tuple[Tensor, Tensor, int] | None = None
        self._attended: list[int] = []
        self._replay: Callable[[], None] = lambda: None
        self._output = self._x
        self._read = [*shard.model.parameters(), *shard.model.buffers()]  # kept alive

    @torch.inference_mode()
    def record(self, forward: Forward, x: Tensor, filled: Callable[[], SpanCache | None]) -> None:
        """Capture ``forward``, and check it on rows ``x`` [1, width or width, D] on the CPU.

        ``filled`` makes a cache that holds some tokens, or None if the shard has no layers.

        Raises:
            NotReplayable: the forward depends on more than its input tensors.
        """
        with torch.cuda.device(self._shard.device), fused(self._shard.model):
            held, cache, rest = filled(), filled(), x[:, 3:]
            with _Watch(self._shard.device):
                self._run(forward, 0)  # with no row in the table yet
            if held is not None and not self._fits(held):
                raise NotReplayable("its caches have an unexpected shape or dtype")
            # From here on rows are written to these caches, which must stay alive.
            self._set(x, [held], [self.width])
            with _Watch(self._shard.device):
                near, far = (self._run(forward, length) for length in (0, _FAR))
            if not torch.equal(near, far):
                raise NotReplayable("the forward depends on the cache length as a Python value")
            self._replay, self._output = _capture(lambda: self._run(forward, 0))
            self.step(x[:, :3], [cache], [3])  # so that the positions differ, too
            self._set(rest, [cache], [rest.shape[1]])
            plain = self._run(forward, 0)
            self._replay()
        if not torch.equal(self._output[:, : rest.shape[1]], plain[:, : rest.shape[1]]):
            raise NotReplayable("replayed steps differ from the forward")

    def step(self, x: Tensor, caches: Sequence[SpanCache | None], rows: Sequence[int]) -> Tensor:
        """Run rows ``x`` [1, T or T, D] on the CPU; ``rows[i]`` of them belong to ``caches[i]``.

        Waits for the output, and returns it on the CPU. Takes at most ``width`` rows.

        Raises:
            ValueError: a session occurs twice; extending its cache again could move the first rows.
        """
        held = [each for each in caches if each is not None]
        if len(set(map(id, held))) < len(held):
            raise ValueError("a session occurs twice in one step")
        try:
            with torch.cuda.device(self._shard.device), torch.inference_mode():
                self._set(x, caches, rows)
                self._replay()
                output = to_host(self._output[:, : x.shape[1]])
        except BaseException:
            for each in held:
                each.crop(each.length)  # drops rows that were not written
            raise
        for cache, count in zip(caches, rows, strict=True):
            if cache is not None:
                cache.length += count
        return output

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend with rows of several sessions, query [1, H, T, D] to [1, T, H, E].

        Raises:
            NotReplayable: the keys and values are not those of the last cache update, or the kernel
                cannot be compiled.
        """
        own, its, layer = self._updated or (None, None, -1)
        if own is not key or its is not value or query.dtype != key.dtype:
            raise NotReplayable("attention reads something other than the cache")
        self._updated = None
        self._attended.append(layer)
        table = self._tables[layer - self._shard.span.start]
        try:
            return self._attend(query, key, value, table, scale, window)
        except (OSError, SubprocessError) as reason:  # Triton runs a compiler and `ldconfig`
            raise NotReplayable(f"Triton cannot compile the attention: {reason}") from reason

    def _update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Replace the `update` of a cache; `attend` writes the rows to the caches of a step."""
        if self._updated is not None or key.dtype != value.dtype or len(key) > 1:
            raise NotReplayable("a layer updates its cache without attending to it")
        self._updated = key, value, layer
        if layer not in self._empty:
            self._empty[layer] = key[:, :, :0].clone(), value[:, :, :0].clone()
        return key, value

    def _run(self, forward: Forward, length: int) -> Tensor:
        """Run the current inputs with a cache that reports ``length`` tokens."""
        cache: Any = self._shard.new_cache() if self._shard.span else None
        if cache is not None:
            cache.length, cache.update = length, self._update
            cache.get_seq_length = lambda *_, **__: length
        self._updated, self._attended = None, []
        output = forward(self._x, cache, self._places)
        if self._updated or self._attended != self._layers:
            raise NotReplayable("not every layer attends to its cache exactly once")
        return output

    def _set(self, x: Tensor, caches: Sequence[SpanCache | None], rows: Sequence[int]) -> None:
        """Write the inputs of a step to where the graph reads them, and extend the caches."""
        numbers, at, count = self._blank.clone(), 0, x.shape[1]
        tokens, places, tables = self._split(numbers)
        for cache, own in zip(caches, rows, strict=True):
            if cache is not None:
                mine = slice(at, at + own)
                torch.arange(cache.length, cache.length + own, out=places[0, mine])
                tables[:, mine] = self._entries(cache, own)[:, None]
                tables[:, mine, -1] += torch.arange(own)
            at += own
        if self._shard.embed:
            tokens[:, :count] = x
        else:
            self._x[:, :count].copy_(to_device(x, self._shard.device))
        self._numbers.copy_(to_device(numbers, self._shard.device))

    def _fits(self, cache: SpanCache) -> bool:
        """Return whether a cache filled by stock steps has the layout that `attend` expects."""
        return all(
            (held.dtype, *held.shape[:2], held.shape[3])
            == (like.dtype, *like.shape[:2], like.shape[3])
            for index in self._layers
            for rows, like in zip(cache.layers[index].rows, self._empty[index], strict=True)
            for held in (rows.buffer,)
        )

    def _entries(self, cache: SpanCache, count: int) -> Tensor:
        """Extend a cache by ``count`` rows; return the table entry of the first, per layer."""
        entries = []
        for index in self._layers:
            layer = cache.layers[index]
            if not layer.is_initialized:
                layer.update(*self._empty[index])
            layer.extend(count)
            keys, values = (each.buffer for each in layer.rows)
            entries.append(
                (keys.data_ptr(), values.data_ptr(), keys.shape[2], layer.rows[0].used - count)
            )
        return torch.tensor(entries, dtype=torch.int64).view(-1, _FIELDS)

    def _split(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """View as tokens [1, width], positions [1, width] and tables [layers, width, _FIELDS]."""
        width = self.width
        tables = numbers[2 * width :].view(-1, width, _FIELDS)
        return numbers[None, :width], numbers[None, width : 2 * width], tables


class _Watch(TorchDispatchMode):
    """Raises `NotReplayable` if a forward does what a graph cannot replay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it open
        self._kind = device.type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_given = any(result is each for each in args)  # as dropout does outside of training
        if not is_given and any(tag in func.tags for tag in _UNTRACEABLE):
            raise NotReplayable(f"{func} is data-dependent or random")
        gone = [each for each in _tensors(result) if each.device.type != self._kind]
        came = any(each.device.type == self._kind for each in _tensors((args, kwargs)))
        if gone and (came or any(each.dim() for each in gone)):
            raise NotReplayable(f"{func} uses another device")
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _kernel() -> Callable[..., Tensor]:
    """Return the attention kernel that reads cache addresses from a table.

    Raises:
        NotReplayable: Triton is not installed.
    """
    try:
        from meshllm.model.kernels import triton_attention
    except ImportError as reason:
        raise NotReplayable(f"{reason}") from None
    return triton_attention.attend


def _capture(forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture a forward in a CUDA graph; return its replay function and its output tensor."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it open
    try:
        with (
            _one_at_a_time,
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            output = forward()
    finally:
        torch.cuda.set_stream(before)  # after an error it may still be the capture's
    return graph.replay, output
