"""A list of kernel calls that runs as a single call from Python.

Theory of operation
-------------------
Between two kernels called from Python some ten microseconds pass, mostly on cache misses: the
weights evicted the interpreter's data from the CPU cache. A program is an array in memory with the
function, the arguments and the threads of each call.

All threads run it together: the first, the leader, goes through the calls, and publishes the number
of each one that has blocks for others. The others follow, and claim blocks of the latest. The
leader goes on when all blocks are finished, not when all threads have come: a thread that the
system has suspended, because other programs use the cores, delays no call unless it holds a block.
One that comes late finds no block left. Only the end of a program waits for all threads, so
counters are never reset under a thread.
"""

import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from meshllm.model.kernels.ir import INT, Code
from meshllm.model.kernels.jit import BLOCKS, CLAIMED, FIELDS, FINISHED, STARTED, JitFunction

_FIELDS = "*calls", "count", "*published", "yield"
_EACH = 3  # integers per call
_END = 1 << 62  # published after the last call
_SPINS = 1000  # some 30 us of waiting, then let other programs run
_VOID, _PLACE = ir.VoidType(), ir.PointerType()
_WORK = ir.FunctionType(_VOID, [_PLACE])


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel and its arguments."""

    native: JitFunction
    threads: int
    given: "ctypes.Array[ctypes.c_int64]"
    """Counters, the number of blocks, and the fields, which may be changed.

    See `JitFunction.given`.
    """
    kept: Any
    """Memory that the fields point to, if this call owns it."""

    @classmethod
    def of(
        cls, native: JitFunction, blocks: int, threads: int, values: Sequence[int], kept: Any = None
    ) -> "Call":
        """Build a call from field values."""
        return cls(native, threads, native.given(blocks, *values), kept)

    @property
    def fields(self) -> dict[str, int]:
        """The fields by name."""
        return dict(zip(self.native.fields, self.given[FIELDS:], strict=True))


class Program:
    """A list of calls that is run repeatedly, by one thread at a time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Take at least one call; those of several threads must not share argument arrays."""
        self._kept = list(calls)
        numbers = [
            number
            for call in calls
            for number in (call.native.address, ctypes.addressof(call.given), call.threads)
        ]
        self._calls = (ctypes.c_int64 * len(numbers))(*numbers)
        self._threads = max(call.threads for call in calls)
        self._published = ctypes.c_int64()
        places = ctypes.addressof(self._calls), len(calls), ctypes.addressof(self._published)
        self._fields = *places, _yield_address()

    def share(self, call: int, threads: int) -> None:
        """Set the number of threads of a call."""
        self._calls[_EACH * call + 2] = threads
        self._threads = max(self._threads, threads)

    def run(self) -> None:
        """Run all calls in order."""
        self._published.value = 0
        _runner()(self._threads, self._threads, *self._fields)


@cache
def _yield_address() -> int:
    """Return the address of the function that lets another thread run; 0 if there is none."""
    if os.name != "posix":
        return 0
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@cache
def _runner() -> JitFunction:
    """Compile what each thread does; its first block is that of the leader."""

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        runner = _Runner(code, fields)
        with code.do.if_else(code.do.icmp_unsigned("==", block, code.index(0))) as (first, others):
            with first:
                runner.lead()
            with others:
                runner.follow(block)

    return JitFunction(_FIELDS, write)


@dataclass(frozen=True, slots=True)
class _Runner:
    """Emits what the threads of a program do."""

    code: Code
    fields: Mapping[str, ir.Value]

    def lead(self) -> None:
        """Go through all calls."""
        code, do = self.code, self.code.do
        with code.loop(self.fields["count"]) as call:
            address, given, threads = self._call(call.index)
            for place in (CLAIMED, STARTED, FINISHED):
                code.store(INT, code.index(0), given, code.index(place))
            is_shared = do.icmp_unsigned(">", threads, code.index(1))
            with do.if_then(is_shared):
                self._publish(do.add(call.index, code.index(1)))
            do.call(address, [given])
            with do.if_then(is_shared):
                blocks = code.load(INT, given, code.index(BLOCKS))
                finished = code.at(given, code.index(FINISHED), INT)
                self._await(finished, "==", blocks)
        self._publish(code.index(_END))

    def follow(self, block: ir.Value) -> None:
        """Help with each call that is published, if it is for this many threads."""
        code, do = self.code, self.code.do
        function = do.function
        before, follow, help_, end = do.block, *(function.append_basic_block() for _ in range(3))
        do.branch(follow)
        do.position_at_end(follow)
        last = do.phi(INT)
        last.add_incoming(code.index(0), before)
        number = self._await(self.fields["published"], "!=", last)
        do.cbranch(do.icmp_unsigned("==", number, code.index(_END)), end, help_)
        do.position_at_end(help_)
        address, given, threads = self._call(do.sub(number, code.index(1)))
        with do.if_then(do.icmp_unsigned("<", block, threads)):
            do.call(address, [given])
        last.add_incoming(number, do.block)
        do.branch(follow)
        do.position_at_end(end)

    def _call(self, index: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Load a call: its function, its arguments and its threads."""
        code, do = self.code, self.code.do
        first = do.mul(index, code.index(_EACH))
        address, given, threads = (
            code.load(INT, self.fields["calls"], do.add(first, code.index(at)))
            for at in range(_EACH)
        )
        return do.inttoptr(address, _WORK.as_pointer()), do.inttoptr(given, _PLACE), threads

    def _publish(self, number: ir.Value) -> None:
        self.code.do.atomic_rmw("xchg", self.fields["published"], number, "release")

    def _await(self, place: ir.Value, relation: str, value: ir.Value) -> ir.Value:
        """Wait until the number at ``place`` has a relation to a value; return it."""
        code, do = self.code, self.code.do
        before, wait, idle, end = do.block, *(do.function.append_basic_block() for _ in range(3))
        do.branch(wait)
        do.position_at_end(wait)
        spins = do.phi(INT)
        spins.add_incoming(code.index(0), before)
        found = do.load_atomic(place, "acquire", 8, typ=INT)
        do.cbranch(do.icmp_unsigned(relation, found, value), end, idle)
        do.position_at_end(idle)
        self._pause()
        is_long = do.icmp_unsigned(">", spins, code.index(_SPINS))
        is_known = do.icmp_unsigned("!=", self.fields["yield"], code.index(0))
        with do.if_then(do.and_(is_long, is_known), likely=False):
            kind = ir.FunctionType(ir.IntType(32), [])
            do.call(do.inttoptr(self.fields["yield"], kind.as_pointer()), [])
        spins.add_incoming(do.add(spins, code.index(1)), do.block)
        do.branch(wait)
        do.position_at_end(end)
        return found

    def _pause(self) -> None:
        """Tell the core that it waits, where an instruction for that is known."""
        if platform.machine().lower() in {"x86_64", "amd64"}:
            name, module = "llvm.x86.sse2.pause", self.code.do.module
            pause = module.globals.get(name)
            self.code.do.call(pause or ir.Function(module, ir.FunctionType(_VOID, []), name), [])
