"""A list of kernel calls that runs as a single call from Python.

Between two kernels called from Python some ten microseconds pass, mostly on cache misses: the
weights evicted the interpreter's data from the CPU cache. A program is an array in memory with the
function, the arguments and the threads of each call.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, cast

from llvmlite import ir

from meshllm.model.kernels import jit
from meshllm.model.kernels.ir import INT, WORD, Code
from meshllm.model.kernels.jit import JitFunction

_FIELDS = "*calls", "count", "parallel", "times"
_EACH = 3  # integers per call
_VOID, _PLACE = ir.VoidType(), ir.PointerType()
_WORK = ir.FunctionType(_VOID, [_PLACE])
_START = ir.FunctionType(_VOID, [_PLACE, _PLACE, WORD, WORD])


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel and its arguments."""

    native: JitFunction
    threads: int
    given: "ctypes.Array[ctypes.c_int64]"
    """Two counters, the blocks and the fields, which may be changed; see `JitFunction.given`."""
    kept: Any
    """Memory that the fields point to, if this call owns it."""

    @classmethod
    def of(
        cls, native: JitFunction, blocks: int, threads: int, values: Sequence[int], kept: Any = None
    ) -> "Call":
        """Build a call from field values."""
        return cls(native, threads, native.given(blocks, *values), kept)


class Program:
    """A list of calls that is run repeatedly."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Take at least one call; argument arrays are not copied, and calls may share them."""
        self._kept = list(calls)
        numbers = [
            number
            for call in calls
            for number in (call.native.address, ctypes.addressof(call.given), call.threads)
        ]
        self._calls = (ctypes.c_int64 * len(numbers))(*numbers)
        start = jit.openmp_parallel()
        address = ctypes.cast(cast("Any", start), ctypes.c_void_p).value if start else 0
        self._fields = ctypes.addressof(self._calls), len(calls), address or 0

    def share(self, call: int, threads: int) -> None:
        """Set the number of threads of a call."""
        self._calls[_EACH * call + 2] = threads

    def run(self) -> None:
        """Run all calls in order."""
        _runner()(1, 1, *self._fields, 0)

    def run_timed(self) -> list[tuple[Call, int]]:
        """Run all calls in order; return each with the ticks of the CPU's counter that it took."""
        times = (ctypes.c_int64 * (len(self._kept) + 1))()
        _runner()(1, 1, *self._fields, ctypes.addressof(times))
        ticks = (after - before for before, after in pairwise(times))
        return list(zip(self._kept, ticks, strict=True))


@cache
def _runner() -> JitFunction:
    def note_time(code: Code, times: ir.Value, number: ir.Value) -> None:
        do, kind = code.do, ir.FunctionType(INT, [])
        name = "llvm.readcyclecounter"
        counter = do.module.globals.get(name) or ir.Function(do.module, kind, name)
        with do.if_then(do.icmp_unsigned("!=", times, code.index(0)), likely=False):
            code.store(INT, do.call(counter, []), do.inttoptr(times, _PLACE), number)

    def write(code: Code, fields: Mapping[str, ir.Value], _block: ir.Value, _: ir.Value) -> None:
        do = code.do
        start = do.inttoptr(fields["parallel"], _START.as_pointer())
        is_one = do.icmp_unsigned("==", fields["parallel"], code.index(0))
        with code.loop(fields["count"]) as call:
            note_time(code, fields["times"], call.index)
            first = do.mul(call.index, code.index(_EACH))
            address, given, threads = (
                code.load(INT, fields["calls"], do.add(first, code.index(at)))
                for at in range(_EACH)
            )
            place = do.inttoptr(given, _PLACE)
            for at in range(2):
                code.store(INT, code.index(0), place, code.index(at))
            alone = do.or_(is_one, do.icmp_unsigned("<=", threads, code.index(1)))
            with do.if_else(alone) as (then, otherwise):
                with then:
                    do.call(do.inttoptr(address, _WORK.as_pointer()), [place])
                with otherwise:
                    work = do.inttoptr(address, _PLACE)
                    count, flags = do.trunc(threads, WORD), ir.Constant(WORD, 0)
                    do.call(start, [work, place, count, flags])
        note_time(code, fields["times"], fields["count"])

    return JitFunction(_FIELDS, write)
