"""A traced forward, compiled to run again in a preallocated arena.

Theory of operation: the trace of `meshllm.model.steps.trace` is lowered to compiled functions that
run one after the other without Python in between; an operation without one remains a call of torch.
A memory block is reused after its last use. Only two things change from step to step: the input
rows, and the KV caches, whose addresses are written into the calls before they run. A batch of
sessions runs by a plan, in which each session has its own calls for its cache. A plan is made for
the sessions' numbers of rows in descending order: as rows do not depend on one another, sessions in
another order are sorted first, and their output rows are permuted back. For the same reason there
may be fewer rows than were traced; the others, the padding, are zeros and attend to nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from meshllm.model.json_cache import load_cached, store_cached
from meshllm.model.kernels.attention import KEYS, SCORES, SEEN, THREADED, prepare, room_for
from meshllm.model.kernels.elementwise import SOURCE, TARGET, copy_lines
from meshllm.model.kernels.jit import machine, private_folder
from meshllm.model.kernels.program import Call, Program
from meshllm.model.split.kv_cache import RowLayout, SpanCache
from meshllm.model.steps.lowering import all_bfloat16, calls_for, is_elementwise
from meshllm.model.steps.trace import (
    Address,
    Attend,
    BlockView,
    ExternalTensor,
    Item,
    KernelCall,
    Op,
    Trace,
    blocks_of,
    resolved,
)

INPUTS = 2
"""Tensors that a trace begins with: rows, and their positions."""
MAX_PLANS = 16
"""Plans in the LRU cache; peers may request any division of rows among sessions."""

_LINE = 64  # bytes; blocks are aligned to it, as torch's own are

Step = Call | Callable[[], None] | Attend


@dataclass(slots=True)
class _Attention:
    """The three calls of a layer for rows that belong to one session, of any plan."""

    layer: int
    rows: int
    window: int | None
    held: int
    """Heads whose scores each thread holds."""
    numbers: int
    """Of the values of a key that all rows see."""
    key: Call
    value: Call
    mix: Call
    bound: tuple[RowLayout, RowLayout, int, int] | None = None
    """The memory that these were bound to last: it is the same in most steps of a session."""

    def bind(self, keys: RowLayout, values: RowLayout, scores: int, room: int) -> None:
        """Write all of the calls that depends on a session, but addresses and lengths."""
        self.bound = keys, values, scores, room
        _, key_head, key_row, _ = keys
        _, value_head, value_row, _ = values
        self.key.given[TARGET] = [0, key_head, key_row]
        self.value.given[TARGET] = [0, value_head, value_row]
        self.mix.given[KEYS] = [0, key_head, key_row, 0, value_head, value_row]
        self.mix.given[SCORES] = [scores, room]


@dataclass(slots=True)
class _Binding:
    """What attends in a layer for one session of a plan."""

    session: int
    attention: _Attention
    at: int
    """Index of the attention call in its program."""
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What runs a batch of sessions with given numbers of rows."""

    parts: Sequence[Callable[[], None]]
    bindings: Sequence[_Binding]


class ScoreBuffer:
    """Memory for the attention scores of steps that run one at a time."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0, dtype=torch.float32)

    @property
    def bytes(self) -> int:
        """The memory in use."""
        return self._numbers.nbytes

    def address(self, count: int) -> int:
        """Return the address of this many float32 numbers, valid until the next call."""
        if len(self._numbers) < count:
            self._numbers = torch.empty(2 * count, dtype=torch.float32)
        return self._numbers.data_ptr()


class CompiledStep:
    """A compiled forward of a number of rows, or fewer."""

    def __init__(self, recording: Trace, x: Tensor, threads: int, scores: ScoreBuffer) -> None:
        """Compile the trace of a forward of rows ``x``, their positions, and caches."""
        self._threads = threads
        self._kind = x.shape, x.dtype
        offsets, size = _allocate(recording)
        self._arena = torch.empty(size, dtype=torch.uint8)
        self._offsets = offsets
        self._kept: list[Any] = []  # keeps alive what addresses point to
        self._verified = dict[Any, bool]()
        self._steps = [step for item in recording.items for step in self._lower(item)]
        self._inputs = tuple(self._whole(recording.sizes[at], at) for at in range(INPUTS))
        self._output = self._tensor(recording.output)
        self._scores = scores
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._attentions: dict[tuple[int, int, int], _Attention] = {}
        self._skips: dict[tuple[int, int], Call] = {}

    @property
    def bytes(self) -> int:
        """The memory of the arena."""
        return self._arena.nbytes

    def takes(self, x: Tensor) -> bool:
        """Return whether there are as many rows as traced or fewer, of the same kind."""
        (texts, rows, *width), dtype = self._kind
        given = x.shape[0], *x.shape[2:]
        return x.dtype == dtype and given == (texts, *width) and x.shape[1] <= rows

    @torch.inference_mode()
    def run(
        self, x: Tensor, places: Tensor, caches: Sequence[SpanCache], rows: Sequence[int]
    ) -> Tensor:
        """Run rows ``x`` at positions ``places`` [1, T]; ``rows[i]`` belong to ``caches[i]``.

        There are no caches if nothing attends, as in an LM head.
        """
        if not caches:  # one plan for all divisions of the rows, and for fewer of them
            return self._run(x, places, caches, [self._kind[0][1]])
        order = sorted(range(len(rows)), key=lambda at: -rows[at])
        if order == list(range(len(rows))):
            return self._run(x, places, caches, rows)
        stops = list(accumulate(rows))
        taken = [row for at in order for row in range(stops[at] - rows[at], stops[at])]
        sessions = [caches[at] for at in order], [rows[at] for at in order]
        output = self._run(x[:, taken], places[:, taken], *sessions)
        return output[:, sorted(range(len(taken)), key=taken.__getitem__)]

    def _run(
        self, x: Tensor, places: Tensor, caches: Sequence[SpanCache], rows: Sequence[int]
    ) -> Tensor:
        plan = self._find(tuple(rows))
        for given, memory in zip((x, places), self._inputs, strict=True):
            numbers = memory.view(given.dtype)
            numbers[: given.numel()].copy_(given.reshape(-1))
            if given.numel() < len(numbers):
                numbers[given.numel() :].zero_()
        try:
            self._bind(plan.bindings, caches)
            for part in plan.parts:
                part()
        except BaseException:
            for cache in caches:
                cache.crop(cache.length)  # drops rows that were not written
            raise
        for cache, count in zip(caches, rows, strict=False):
            cache.length += count
        return self._output[:, : x.shape[1]].clone()

    def _bind(self, bindings: Sequence[_Binding], caches: Sequence[SpanCache]) -> None:
        """Extend the caches by the rows, and write the addresses into the calls."""
        layers = [caches[bound.session].layers[bound.attention.layer] for bound in bindings]
        seen = [
            layer.extend(bound.attention.rows)
            for layer, bound in zip(layers, bindings, strict=True)
        ]
        room = room_for(max(seen, default=0))
        held = max((bound.attention.held for bound in bindings), default=0)
        scores = self._scores.address(held * self._threads * room)
        for bound, layer, count in zip(bindings, layers, seen, strict=True):
            attention, (keys, values) = bound.attention, layer.rows
            if attention.bound != (memory := (keys.place, values.place, scores, room)):
                attention.bind(*memory)
            given, own = attention.mix.given, attention.rows
            for rows, call, place in (
                (keys, attention.key, KEYS.start),
                (values, attention.value, KEYS.start + 3),
            ):
                address, _, _, size = rows.place
                end = address + rows.used * size
                call.given[TARGET.start], given[place] = end - own * size, end - count * size
            given[SEEN] = [count, attention.window or count]
            assert bound.program is not None
            is_long = count * attention.numbers > THREADED
            bound.program.share(bound.at, self._threads if is_long else 1)

    def _find(self, rows: tuple[int, ...]) -> _Plan:
        """Return the plan for these rows; make it if needed, and evict the least recently used."""
        self._plans[rows] = plan = self._plans.pop(rows, None) or self._plan(rows)
        if len(self._plans) > MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _plan(self, rows: tuple[int, ...]) -> _Plan:
        parts, bindings, calls = list[Callable[[], None]](), list[_Binding](), list[Call]()
        for step in (*self._steps, None):
            if isinstance(step, Call):
                calls.append(step)
            elif isinstance(step, Attend):
                first = 0
                for session, count in enumerate(rows):
                    attention = self._attention(step, first, count)
                    bindings.append(_Binding(session, attention, len(calls) + 2))
                    calls += attention.key, attention.value, attention.mix
                    first += count
                calls += self._skip(step, first)
            else:
                parts += _compiled(calls, bindings)
                parts += [step] if step else []
                calls = []
        return _Plan(parts, bindings)

    def _attention(self, item: Attend, first: int, count: int) -> _Attention:
        """Return the calls for this many rows from the first one on, which plans share."""
        key = id(item), first, count
        if key not in self._attentions:
            self._attentions[key] = self._attend(item, first, count)
        return self._attentions[key]

    def _attend(self, item: Attend, first: int, count: int) -> _Attention:
        query, key, value = (
            self._tensor(each)[:, :, first : first + count]
            for each in (item.query, item.key, item.value)
        )
        copies = []
        for source in (key, value):
            native, values = copy_lines(source.shape[1:], source.stride()[1:])
            copies.append(Call.of(native, 1, 1, values))
            copies[-1].given[SOURCE] = source.data_ptr()
        groups, mixed = key.shape[1], self._tensor(item.out)[:, first : first + count]
        native, held, values = prepare(query, mixed, groups, item.scale)
        mix = Call.of(native, groups * count, 1, values)
        numbers = groups * value.shape[3] * count
        return _Attention(item.layer, count, item.window, held, numbers, copies[0], copies[1], mix)

    def _skip(self, item: Attend, first: int) -> list[Call]:
        """Return the call that sets the attention of the padding to zero, if there is any."""
        mixed = self._tensor(item.out)[:, first:].flatten(2)
        if not mixed.shape[1]:
            return []
        key = id(item), first
        if key not in self._skips:
            zeros = _zeros(mixed.shape[2], mixed.dtype)
            native, values = copy_lines(mixed.shape, (0, 0))
            self._skips[key] = call = Call.of(native, 1, 1, values, zeros)
            call.given[SOURCE] = zeros.data_ptr()
            call.given[TARGET] = [mixed.data_ptr(), *mixed.stride()[:2]]
        return [self._skips[key]]

    def _lower(self, item: Item) -> Iterator[Step]:
        if isinstance(item, Attend):
            yield item
        elif isinstance(item, KernelCall):
            values = [
                self._address(each) if isinstance(each, Address) else each for each in item.values
            ]
            yield Call.of(item.native, item.blocks, item.threads, values)
        else:
            args = resolved(item.args, self._tensor)
            kwargs = dict(resolved(item.kwargs, self._tensor))
            outs = [self._tensor(each) for each in item.outs]
            self._kept.append((args, kwargs))
            calls = calls_for(item.function, args, kwargs, outs or args[:1])
            if calls and self._is_verified(item):
                yield from calls
            else:
                yield partial(_eager, item.function, args, kwargs, outs)

    def _is_verified(self, item: Op) -> bool:
        """Verify each distinct operation once: layers repeat them."""
        signature = resolved(
            (item.function, item.args, item.kwargs, item.outs),
            _signature,
        )
        if signature not in self._verified:
            self._verified[signature] = _agrees(item)
        return self._verified[signature]

    def _address(self, ref: Address) -> int:
        return self._arena.data_ptr() + self._offsets[ref.block] + ref.offset

    def _tensor(self, place: BlockView | ExternalTensor) -> Tensor:
        if isinstance(place, ExternalTensor):
            return place.tensor
        first = self._offsets[place.ref.block] + place.ref.offset
        size = 1 + sum((n - 1) * by for n, by in zip(place.shape, place.strides, strict=True))
        memory = self._arena[first : first + size * place.dtype.itemsize].view(place.dtype)
        return memory.as_strided(place.shape, place.strides)

    def _whole(self, size: int, block: int) -> Tensor:
        return self._arena[self._offsets[block] : self._offsets[block] + size]


def _signature(tensor: BlockView | ExternalTensor) -> Any:
    """Describe a tensor without its address; external ones, such as weights, with it."""
    if isinstance(tensor, ExternalTensor):
        return tensor
    return tensor.dtype, tensor.shape, tensor.strides


def _compiled(calls: Sequence[Call], bindings: Sequence[_Binding]) -> Sequence[Callable[[], None]]:
    """Compile the calls, if any, and assign the program to bindings that have none."""
    if not calls:
        return ()
    program = Program(calls)
    for bound in bindings:
        bound.program = bound.program or program
    return (program.run,)


def _eager(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor]
) -> None:
    """Run an operation in torch, and copy its results to ``outs``."""
    result = function(*args, **kwargs)
    for out, each in zip(
        outs, (result,) if isinstance(result, Tensor) else result, strict=bool(outs)
    ):
        out.copy_(each)


def _agrees(item: Op) -> bool:
    """Compare compiled functions with torch.

    On the traced values and, if the operation is elementwise, on all bfloat16 values.
    """
    (args, kwargs), result = item.seen
    if not isinstance(result, Tensor):
        return False
    out = _like(result)
    given = args if item.outs else (out, *args[1:])
    calls = calls_for(item.function, given, kwargs, [out])
    if not calls:
        return False
    Program(calls).run()
    if not _are_same(out, result):
        return False
    if not is_elementwise(item.function, args, kwargs):
        return True
    first, *others = args
    layout = first.dtype, tuple(first.shape), first.stride()
    named = tuple(sorted(kwargs.items()))
    threads = torch.get_num_threads()
    return bool(item.outs) and _agrees_on_all(item.function, layout, tuple(others), named, threads)


@lru_cache(1024)
def _agrees_on_all(
    function: Any,
    layout: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]],
    others: tuple[Any, ...],
    named: tuple[tuple[str, Any], ...],
    threads: int,
) -> bool:
    """Compare all bfloat16 values, in tensors of one layout, with this many threads.

    The verdict is cached in this process, and on disk for others.
    """
    (dtype, shape, strides), kwargs = layout, dict(named)
    if 0 in strides:
        return False
    x = torch.empty_strided(shape, strides, dtype=dtype).zero_()
    out = _like(function(x, *others, **kwargs))
    calls = calls_for(function, (x, *others), kwargs, [out])
    if not calls:
        return False
    does = str(function), repr(layout), repr(others), repr(named), threads
    key: tuple[str | float, ...] = (
        "all numbers",
        *does,
        torch.__version__,
        *machine(),
        *(at.native.digest for at in calls),
    )
    folder = private_folder()
    known = load_cached(folder, *key) if folder else None
    if isinstance(known, bool):
        return known
    verdict = _try_all(Program(calls), partial(function, x, *others, **kwargs), x, out)
    if folder:
        store_cached(folder, verdict, *key)
    return verdict


def _try_all(program: Program, function: Callable[[], Tensor], x: Tensor, out: Tensor) -> bool:
    """Compare the ``out`` of a program with the result of a function on all bfloat16 values."""
    bits = torch.int16  # fast to compare, except with NaN
    for part in torch.split(all_bfloat16(), x.numel()):
        x.copy_(part.repeat(-(-x.numel() // len(part)))[: x.numel()].view(x.shape))
        program.run()
        result = function()
        if not (torch.equal(out.view(bits), result.view(bits)) or _are_same(out, result)):
            return False
    return True


@lru_cache(16)
def _zeros(count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def _like(result: Tensor) -> Tensor:
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)


def _are_same(out: Tensor, result: Tensor) -> bool:
    """Compare values: the sign of a zero counts, the payload of a NaN does not."""
    same = (out == result) & (out.signbit() == result.signbit())
    return bool((same | (out.isnan() & result.isnan())).all())


class _Arena:
    """Offsets of aligned blocks in an arena; a freed block is reused for one of its size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [-(-size // _LINE) * _LINE for size in sizes]
        self._free: dict[int, list[int]] = {}
        self.offsets = [-1] * len(sizes)
        """By block, in bytes; -1 before it is allocated."""
        self.size = 0

    def allocate(self, block: int) -> None:
        """Allocate a block, unless it is allocated."""
        if self.offsets[block] < 0:
            wanted = self._sizes[block]
            if free := self._free.get(wanted):
                self.offsets[block] = free.pop()
            else:
                self.offsets[block], self.size = self.size, self.size + wanted

    def free(self, block: int) -> None:
        """Make the memory of a block available to others."""
        self._free.setdefault(self._sizes[block], []).append(self.offsets[block])


def _allocate(recording: Trace) -> tuple[list[int], int]:
    """Allocate each block from its first to its last use; return offsets and total size."""
    touched = [blocks_of(item) for item in recording.items]
    last = {block: at for at, blocks in enumerate(touched) for block in blocks}
    arena, kept = _Arena(recording.sizes), {*range(INPUTS), recording.output.ref.block}
    for block in sorted(kept):
        arena.allocate(block)
    for at, blocks in enumerate(touched):
        for block in sorted(blocks):
            arena.allocate(block)
        for block in sorted(blocks - kept):
            if last[block] == at:
                arena.free(block)
    return arena.offsets, arena.size
