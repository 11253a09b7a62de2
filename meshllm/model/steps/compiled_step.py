"""A recorded forward that is done again, in memory of its own.

Theory of operation: what `meshllm.model.steps.trace` wrote down becomes compiled functions that run
one after the other without Python in between; what has no compiled one stays an operation of torch.
Blocks of memory are used again by others once nothing more is to be done with them. Only two things
change from step to step: the rows that come in, and the caches, whose places are written into the
calls before these begin. Sessions go together if each has a call of its own for its cache: a plan,
which is made for numbers of rows in falling order. As no row depends on those beside it, sessions
that come in another order are sorted, and what they give is put back.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from meshllm.model.json_cache import recall, remember
from meshllm.model.kernels.attention import KEYS, SCORES, SEEN, THREADED, prepare, room_for
from meshllm.model.kernels.elementwise import SOURCE, TARGET, copy_lines
from meshllm.model.kernels.jit import machine, private_folder
from meshllm.model.kernels.program import Call, Program
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.lowering import calls_for, is_of_one, numbers
from meshllm.model.steps.trace import (
    Attend,
    Item,
    KernelCall,
    Op,
    Outside,
    Place,
    Recording,
    Ref,
    blocks_of,
    resolved,
)

INPUTS = 2
"""Tensors that a recording begins with: rows, and their places."""
MOST_PLANS = 8
"""Ways to divide rows among sessions that are kept, those used last; peers may ask for any."""

_LINE = 64  # bytes; blocks begin there, as torch's own do

Step = Call | Callable[[], None] | Attend


@dataclass(slots=True)
class _Move:
    """What is told of the cache of a session to three calls of a layer."""

    session: int
    layer: int
    rows: int
    window: int | None
    held: int
    """Heads of which each thread keeps scores."""
    key: Call
    value: Call
    attention: Call
    at: int
    """Number of the last one among its program's calls."""
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is done for sessions that have so many rows each."""

    parts: Sequence[Callable[[], None]]
    moves: Sequence[_Move]


class Tape:
    """A forward of so many rows."""

    def __init__(self, recording: Recording, x: Tensor, threads: int) -> None:
        """Prepare what was recorded of rows ``x``, their places, and caches."""
        self._threads = threads
        self._kind = x.shape, x.dtype
        offsets, size = _arrange(recording)
        self._arena = torch.empty(size, dtype=torch.uint8)
        self._offsets = offsets
        self._kept: list[Any] = []  # what addresses point to
        self._trusted = dict[Any, bool]()
        self._steps = [step for item in recording.items for step in self._lower(item)]
        self._inputs = tuple(self._whole(recording.sizes[at], at) for at in range(INPUTS))
        self._output = self._tensor(recording.output)
        self._scores = torch.empty(0, dtype=torch.float32)
        self._plans: dict[tuple[int, ...], _Plan] = {}

    @property
    def bytes(self) -> int:
        """Memory of its own."""
        return self._arena.nbytes + self._scores.nbytes

    def takes(self, x: Tensor) -> bool:
        """Whether rows are of the kind that was recorded."""
        return (x.shape, x.dtype) == self._kind

    @torch.inference_mode()
    def run(
        self, x: Tensor, places: Tensor, caches: Sequence[SpanCache], rows: Sequence[int]
    ) -> Tensor:
        """Do it with rows ``x`` at ``places`` [1, T]; ``rows[i]`` of them go to ``caches[i]``.

        There are no caches where nothing attends, as in a head.
        """
        order = sorted(range(len(rows)), key=lambda at: -rows[at])
        if not caches or order == list(range(len(rows))):
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
            memory.view(given.dtype)[: given.numel()].copy_(given.reshape(-1))
        try:
            self._move(plan.moves, caches)
            for part in plan.parts:
                part()
        except BaseException:
            for cache in caches:
                cache.crop(cache.length)  # of rows that nobody wrote
            raise
        for cache, count in zip(caches, rows, strict=False):
            cache.length += count
        return self._output.clone()

    def _move(self, moves: Sequence[_Move], caches: Sequence[SpanCache]) -> None:
        """Make room for the rows in their caches, and tell the calls where."""
        seen = [caches[move.session].layers[move.layer].extend(move.rows) for move in moves]
        room = room_for(max(seen, default=0))
        most = max((move.held for move in moves), default=0) * self._threads * room
        if len(self._scores) < most:
            self._scores = torch.empty(2 * most, dtype=torch.float32)
        scores = self._scores.data_ptr()
        for move, count in zip(moves, seen, strict=True):
            places = list[ctypes.c_int64 | int]()
            held = caches[move.session].layers[move.layer].rows
            for rows, call in zip(held, (move.key, move.value), strict=True):
                address, used, size = rows.buffer.data_ptr(), rows.used, rows.buffer.element_size()
                _, plane, line, _ = rows.buffer.stride()
                call.given[TARGET] = [address + (used - move.rows) * line * size, plane, line]
                places += address + (used - count) * line * size, plane, line
            given, numbers = move.attention.given, count * rows.buffer.shape[1] * line
            given[KEYS], given[SCORES] = places, [scores, room]
            given[SEEN] = [count, move.window or count]
            assert move.program is not None
            move.program.share(move.at, self._threads if numbers * move.rows > THREADED else 1)

    def _find(self, rows: tuple[int, ...]) -> _Plan:
        """Find a plan, or make it and evict the one that was not used for longest."""
        self._plans[rows] = plan = self._plans.pop(rows, None) or self._plan(rows)
        if len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _plan(self, rows: tuple[int, ...]) -> _Plan:
        parts, moves, calls = list[Callable[[], None]](), list[_Move](), list[Call]()
        for step in (*self._steps, None):
            if isinstance(step, Call):
                calls.append(step)
            elif isinstance(step, Attend):
                for session in range(len(rows)):
                    move = self._attend(step, rows, session, len(calls))
                    calls += move.key, move.value, move.attention
                    moves.append(move)
            else:
                parts += _together(calls, moves)
                parts += [step] if step else []
                calls = []
        return _Plan(parts, moves)

    def _attend(self, item: Attend, rows: Sequence[int], session: int, at: int) -> _Move:
        """Make the calls of a session, which are to be number ``at`` and following."""
        first, count = sum(rows[:session]), rows[session]
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
        attention, window = Call.of(native, groups * count, 1, values), item.window
        return _Move(
            session, item.layer, count, window, held, copies[0], copies[1], attention, at + 2
        )

    def _lower(self, item: Item) -> Iterator[Step]:
        if isinstance(item, Attend):
            yield item
        elif isinstance(item, KernelCall):
            values = [
                self._address(each) if isinstance(each, Ref) else each for each in item.values
            ]
            yield Call.of(item.native, item.blocks, item.threads, values)
        else:
            args = resolved(item.args, self._tensor)
            kwargs = dict(resolved(item.kwargs, self._tensor))
            outs = [self._tensor(each) for each in item.outs]
            self._kept.append((args, kwargs))
            calls = calls_for(item.function, args, kwargs, outs or args[:1])
            if calls and self._trusts(item):
                yield from calls
            else:
                yield partial(_do, item.function, args, kwargs, outs)

    def _trusts(self, item: Op) -> bool:
        """Try operations of the same look once: layers repeat them."""
        look = resolved(
            (item.function, item.args, item.kwargs, item.outs),
            _look,
        )
        if look not in self._trusted:
            self._trusted[look] = _agrees(item)
        return self._trusted[look]

    def _address(self, ref: Ref) -> int:
        return self._arena.data_ptr() + self._offsets[ref.block] + ref.offset

    def _tensor(self, place: Place | Outside) -> Tensor:
        if isinstance(place, Outside):
            return place.tensor
        first = self._offsets[place.ref.block] + place.ref.offset
        size = 1 + sum((n - 1) * by for n, by in zip(place.shape, place.strides, strict=True))
        memory = self._arena[first : first + size * place.dtype.itemsize].view(place.dtype)
        return memory.as_strided(place.shape, place.strides)

    def _whole(self, size: int, block: int) -> Tensor:
        return self._arena[self._offsets[block] : self._offsets[block] + size]


def _look(tensor: Place | Outside) -> Any:
    """Tell all of a tensor but where it is, which for weights counts, too."""
    if isinstance(tensor, Outside):
        return tensor
    return tensor.dtype, tensor.shape, tensor.strides


def _together(calls: Sequence[Call], moves: Sequence[_Move]) -> Sequence[Callable[[], None]]:
    """Make a program, if there are calls, and let moves that are in none be in it."""
    if not calls:
        return ()
    program = Program(calls)
    for move in moves:
        move.program = move.program or program
    return (program.run,)


def _do(function: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor]) -> None:
    """Let torch do an operation."""
    result = function(*args, **kwargs)
    for out, each in zip(
        outs, (result,) if isinstance(result, Tensor) else result, strict=bool(outs)
    ):
        out.copy_(each)


def _agrees(item: Op) -> bool:
    """Compare what compiled functions give with what torch does.

    Of what was recorded, and of all numbers where an operation takes one by one.
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
    if not is_of_one(item.function, args, kwargs):
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
    """Compare all numbers, through tensors of one layout, with so many threads.

    The verdict is kept for this process, and on disk for others.
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
    known = recall(folder, *key) if folder else None
    if isinstance(known, bool):
        return known
    verdict = _try_all(Program(calls), partial(function, x, *others, **kwargs), x, out)
    if folder:
        remember(folder, verdict, *key)
    return verdict


def _try_all(program: Program, function: Callable[[], Tensor], x: Tensor, out: Tensor) -> bool:
    """Compare what a program writes to ``out`` with what a function gives for all numbers."""
    bits = torch.int16  # quick to compare, but for NaN
    for part in torch.split(numbers(), x.numel()):
        x.copy_(part.repeat(-(-x.numel() // len(part)))[: x.numel()].view(x.shape))
        program.run()
        result = function()
        if not (torch.equal(out.view(bits), result.view(bits)) or _are_same(out, result)):
            return False
    return True


def _like(result: Tensor) -> Tensor:
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)


def _are_same(out: Tensor, result: Tensor) -> bool:
    """Compare numbers: zeros have a sign, and one NaN is as good as another."""
    same = (out == result) & (out.signbit() == result.signbit())
    return bool((same | (out.isnan() & result.isnan())).all())


class _Room:
    """Memory that is lent in lines, and lent again when it comes back."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [-(-size // _LINE) * _LINE for size in sizes]
        self._free: dict[int, list[int]] = {}
        self.offsets = [-1] * len(sizes)
        """Where blocks begin."""
        self.size = 0

    def lend(self, block: int) -> None:
        """Find room for a block that has none."""
        if self.offsets[block] < 0:
            wanted = self._sizes[block]
            if free := self._free.get(wanted):
                self.offsets[block] = free.pop()
            else:
                self.offsets[block], self.size = self.size, self.size + wanted

    def take(self, block: int) -> None:
        """Let others have the room of a block."""
        self._free.setdefault(self._sizes[block], []).append(self.offsets[block])


def _arrange(recording: Recording) -> tuple[list[int], int]:
    """Find room for each block while it is wanted: where they begin, and how much it is."""
    touched = [blocks_of(item) for item in recording.items]
    last = {block: at for at, blocks in enumerate(touched) for block in blocks}
    room, kept = _Room(recording.sizes), {*range(INPUTS), recording.output.ref.block}
    for block in sorted(kept):
        room.lend(block)
    for at, blocks in enumerate(touched):
        for block in sorted(blocks):
            room.lend(block)
        for block in sorted(blocks - kept):
            if last[block] == at:
                room.take(block)
    return room.offsets, room.size
