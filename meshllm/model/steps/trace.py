"""Tracing of a forward, as a list of operations on memory blocks.

Theory of operation: `Tracer` intercepts each operation of torch below Python, each call of a
compiled function, and attention. All tensors are kept alive meanwhile, so an address means the
same tensor throughout. Memory allocated by the forward is numbered as blocks, in the order of
allocation; all else, such as weights, is referenced by its address. What a forward reads on the
host, other than by operations, is not in the trace, so such a forward is `NotReplayable`.
"""

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshllm.model.device import CPU
from meshllm.model.kernels.jit import JitFunction, observe_calls
from meshllm.model.without_compiler import without_compiler

_HIDDEN = torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded
_EMPTY = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "new_empty")}


class NotReplayable(Exception):
    """Says why a forward cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address in a block."""

    block: int
    offset: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """A tensor in a block."""

    ref: Address
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A tensor that was not made by the forward."""

    tensor: Tensor = field(compare=False, repr=False)
    address: int
    """Or the id of a tensor without one."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of torch."""

    function: Any
    args: tuple[Any, ...]
    """With `BlockView` or `ExternalTensor` for each tensor."""
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[BlockView, ...]
    """New tensors; empty if it writes to its arguments."""
    seen: tuple[tuple[Any, ...], Any] = field(repr=False)
    """The actual arguments, and the actual result."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a compiled function."""

    native: JitFunction
    blocks: int
    threads: int
    values: tuple[int | Address, ...]


@dataclass(frozen=True, slots=True)
class Attend:
    """A cache update by new rows, and their attention over the cache."""

    layer: int
    query: BlockView
    """[1, H, T, D]."""
    key: BlockView
    """[1, G, T, D]."""
    value: BlockView
    """[1, G, T, E]."""
    out: BlockView
    """[1, T, H, E]."""
    scale: float
    window: int | None


Item = Op | KernelCall | Attend


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of a forward."""

    items: tuple[Item, ...]
    sizes: tuple[int, ...]
    """Of blocks, in bytes; those of the inputs come first."""
    output: BlockView


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces what runs while it is entered."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        """Expect a forward that depends on these tensors and its caches only."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._items: list[Item] = []
        self._sizes: list[int] = []
        self._starts: list[tuple[int, int]] = []  # of blocks: address and number, in order
        self._kept: list[Any] = []
        self._clones: dict[BlockView, Any] = {}
        self._updated: tuple[Tensor, Tensor, int, tuple[Tensor, Tensor]] | None = None
        self._is_paused = False
        self._fault = ""
        self._exits = ExitStack()
        for tensor in inputs:
            self._register_block(tensor)

    def __enter__(self) -> Self:
        """Start tracing."""
        self._exits.enter_context(observe_calls(self._on_kernel_call))
        self._exits.enter_context(without_compiler())  # torch would import its compiler
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Stop tracing."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exits.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend tracing inside the block."""
        with observe_calls(None):
            self._is_paused = True
            try:
                yield
            finally:
                self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_paused:
            return result
        self._kept.append((args, kwargs, result))
        outs = [each for each in _flat(result) if isinstance(each, Tensor)]
        if not outs:
            self._check_equal(func, args, result)
        elif func.overloadpacket in _EMPTY:
            for each in outs:
                self._register_block(each)
        elif not self._fault:
            self._note(func, args, kwargs, result, outs)
        return result

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, outs: Sequence[Tensor]
    ) -> None:
        inputs = [each for each in _flat((args, kwargs)) if isinstance(each, Tensor)]
        is_plain = all(each.layout == torch.strided for each in outs)
        if not is_plain or any(each.device != CPU for each in (*inputs, *outs)):
            self._reject(f"{func} uses tensors of another layout or device")
            return
        given = tuple(map(self._mark, args)), tuple((k, self._mark(v)) for k, v in kwargs.items())
        is_writing = func._schema.is_mutable
        held = set(map(_storage, inputs))
        new = [each for each in outs if _storage(each) not in held]
        if new and any(tag in func.tags for tag in _HIDDEN):
            self._reject(f"{func} is data-dependent or random")
        elif is_writing and new:
            self._reject(f"{func} both writes to tensors and returns new ones")
        elif is_writing:
            self._items.append(Op(func, *given, (), ((args, kwargs), result)))
            self._drop_clones(blocks_of(self._items[-1]))
        elif new:
            for each in new:
                self._register_block(each)
            places = tuple(map(self._place, outs))
            self._items.append(Op(func, *given, places, ((args, kwargs), result)))
            if func is torch.ops.aten.clone.default:
                self._clones[places[0]] = given[0][0]

    def update(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the `update` of a cache, which is not traced itself."""

        def changed(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                result = change(*args, **kwargs)
            if self._updated is not None or len(args) < len(("key", "value", "layer")):
                self._reject("a layer updates its cache without attending to it")
            else:
                self._updated = *args[:3], result
                self._kept.append(self._updated)
            return result

        return changed

    def attended(
        self,
        query: Tensor,
        seen: tuple[Tensor, Tensor],
        out: Tensor,
        scale: float,
        window: int | None,
    ) -> None:
        """Record attention, which is not traced itself."""
        if self._updated is None:
            self._reject("attention without a cache")
            return
        key, value, layer, held = self._updated
        if held[0] is not seen[0] or held[1] is not seen[1]:
            self._reject("attention reads something other than the cache")
        self._updated = None
        self._register_block(out)
        self._kept.append(query)
        asked, keys, values, mixed = places = [
            self._place(each) for each in (query, key, value, out)
        ]
        if any(place.strides[-1] != 1 or place.dtype != torch.bfloat16 for place in places):
            self._reject("attention of rows that are not contiguous bfloat16")
        self._items.append(Attend(layer, asked, keys, values, mixed, scale, window))

    def end(self, output: Tensor) -> Trace:
        """Return the trace, with only the items that ``output`` depends on."""
        if self._updated is not None:
            self._reject("a layer updates its cache without attending to it")
        place = self._place(output)
        if self._fault:
            raise NotReplayable(self._fault)
        items, wanted = list[Item](), {place.ref.block}
        for item in reversed(self._items):
            made = {each.ref.block for each in item.outs} if isinstance(item, Op) else set[int]()
            if not made or not wanted.isdisjoint(made):
                items.append(item)
                wanted |= blocks_of(item)
        return Trace(tuple(reversed(items)), tuple(self._sizes), place)

    def _check_equal(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Reject reading values, except a comparison that shows a tensor equal to its clone."""
        if func is torch.ops.aten.equal.default and result:
            one, other = (self._mark(each) for each in args)
            for copied, source in ((one, other), (other, one)):
                if isinstance(copied, BlockView) and self._clones.get(copied) == source:
                    return
        self._reject(f"{func} is data-dependent")

    def _drop_clones(self, blocks: set[int]) -> None:
        """Drop clones whose source or copy may have been written to."""
        for copied, source in list(self._clones.items()):
            if not blocks.isdisjoint(
                each.ref.block for each in (copied, source) if isinstance(each, BlockView)
            ):
                del self._clones[copied]

    def _reject(self, fault: str) -> None:
        """Note why the trace is invalid; the forward itself goes on."""
        self._fault = self._fault or fault

    def _on_kernel_call(
        self, native: JitFunction, blocks: int, threads: int, values: Sequence[int]
    ) -> None:
        marks = list[int | Address]()
        for name, value in zip(native.fields, values, strict=True):
            ref = self._ref(value) if name.startswith("*") else None
            if ref is None and name.startswith("*") and value and name not in native.held:
                self._reject(f"kernel argument `{name[1:]}` points to a temporary")
            marks.append(value if ref is None else ref)
        self._items.append(KernelCall(native, blocks, threads, tuple(marks)))
        self._drop_clones(blocks_of(self._items[-1]))

    def _register_block(self, tensor: Tensor) -> None:
        """Number the memory of a new tensor as a block."""
        storage = tensor.untyped_storage()
        self._kept.append(tensor)
        if storage.nbytes() and self._ref(storage.data_ptr()) is None:
            self._starts.insert(
                bisect(self._starts, (storage.data_ptr(), 0)),
                (storage.data_ptr(), len(self._sizes)),
            )
            self._sizes.append(storage.nbytes())

    def _ref(self, address: int) -> Address | None:
        """Find the block that holds an address."""
        at = bisect(self._starts, (address, len(self._sizes))) - 1
        if at < 0:
            return None
        start, block = self._starts[at]
        return Address(block, address - start) if address - start < self._sizes[block] else None

    def _place(self, tensor: Tensor) -> BlockView:
        mark = self._mark(tensor)
        if not isinstance(mark, BlockView):
            self._reject("a tensor that this forward did not make")
            return BlockView(Address(-1, 0), tensor.dtype, tuple(tensor.shape), tensor.stride())
        return mark

    def _mark(self, value: Any) -> Any:
        """Replace tensors, also in lists, by their place; keep other values."""
        if isinstance(value, list | tuple):
            return tuple(map(self._mark, value))
        if not isinstance(value, Tensor):
            return value
        if value.layout != torch.strided:  # a packed matrix
            return ExternalTensor(value, id(value), tuple(value.shape), ())
        shape, strides = tuple(value.shape), value.stride()
        ref = self._ref(value.data_ptr())
        if ref is None or not value.numel():
            return ExternalTensor(value, value.data_ptr(), shape, strides)
        return BlockView(ref, value.dtype, shape, strides)


def blocks_of(item: Item) -> set[int]:
    """Return the numbers of the blocks that an item reads or writes."""
    if isinstance(item, KernelCall):
        return {value.block for value in item.values if isinstance(value, Address)}
    marks = (
        (item.args, item.kwargs, item.outs)
        if isinstance(item, Op)
        else (item.query, item.key, item.value, item.out)
    )
    return {each.ref.block for each in _flat(marks) if isinstance(each, BlockView)}


def resolved(marks: Any, resolve: Callable[[BlockView | ExternalTensor], Any]) -> Any:
    """Resolve each `BlockView` and `ExternalTensor` in nested arguments."""
    if isinstance(marks, tuple):
        return tuple(resolved(each, resolve) for each in marks)
    return resolve(marks) if isinstance(marks, BlockView | ExternalTensor) else marks


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.layout != torch.strided else tensor.untyped_storage().data_ptr()
