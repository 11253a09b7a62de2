"""Where the time of a decode step goes.

``python -m tests.bench.step [--threads 1,2] [--sessions 1,8]``

Published dimensions, random weights, one session or several that run as one batch. Each row is a
kind of kernel call, or an operation that torch runs: calls per step, lower quartile over the steps,
share, and for matrices the bandwidth at which their weights are read, beside what a probe reads.
"""

import ctypes
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from llvmlite import ir

from meshllm.bench.engine_table import probe, read_memory
from meshllm.bench.engines import EngineTask, open_node
from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.device import CPU
from meshllm.model.files.source import open_folder
from meshllm.model.kernels.gemm_bf16 import GEMV_LANES
from meshllm.model.kernels.gemm_int4 import GROUP
from meshllm.model.kernels.ir import INT, LANES, Code
from meshllm.model.kernels.jit import JitFunction
from meshllm.model.kernels.program import Call, Program
from meshllm.model.steps import compiled_step
from meshllm.model.steps.lowering import calls_for
from meshllm.names import Quant
from tests.bench.conditions import conditions, load_of_others, lower_quartile
from tests.bench.report import Report, counts, parser_of

STEPS = 40
WHOLE, OTHER = "step", "Python, and between calls"


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of call in a step."""

    width: str
    threads: int
    sessions: int
    part: str
    calls: int
    us: float
    """All calls of a step, in microseconds, lower quartile."""
    share: float
    """Of the step."""
    gb_per_s: float | None
    """At which the weights are read."""


Timed = list[tuple[Call, int]]
"""Calls with the ticks of the CPU's counter that they took."""


class TimedProgram(Program):
    """A program with a call before each of its own, and one at its end, that read the counter.

    That adds some tens of nanoseconds to each.
    """

    def __init__(self, calls: Sequence[Call], note: Callable[[Timed], None]) -> None:
        self._own, self._note = list(calls), note
        self._times = (ctypes.c_int64 * (len(calls) + 1))()
        place = ctypes.addressof(self._times)
        first, *reads = (Call.of(_counter(), 1, 1, [place, at]) for at in range(len(calls) + 1))
        super().__init__([first, *chain(*zip(calls, reads, strict=True))])

    def share(self, call: int, threads: int) -> None:
        """Set the number of threads of a call."""
        super().share(2 * call + 1, threads)

    def run(self) -> None:
        """Run all calls in order, and note their ticks."""
        super().run()
        ticks = (after - before for before, after in pairwise(self._times))
        self._note(list(zip(self._own, ticks, strict=True)))


@cache
def _counter() -> JitFunction:
    """Compile what stores the CPU's counter."""

    def write(code: Code, fields: Mapping[str, ir.Value], _: ir.Value, __: ir.Value) -> None:
        kind = ir.FunctionType(INT, [])
        counter = ir.Function(code.do.module, kind, "llvm.readcyclecounter")
        code.store(INT, code.do.call(counter, []), fields["times"], fields["at"])

    return JitFunction(("*times", "at"), write)


@dataclass(slots=True)
class Step:
    """Times the parts of a step."""

    ticks_per_us: float
    us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter[str])
    bytes: Counter[str] = field(default_factory=Counter[str])
    """Of the weights that each part reads."""
    timed: Timed = field(default_factory=list)
    """What is added up when the step has ended."""

    def count(self) -> None:
        """Add up what ran, by part."""
        for call, ticks in self.timed:
            part, size = part_of(call)
            self._add(part, ticks / self.ticks_per_us)
            self.bytes[part] += size

    def run_eagerly(self, function: Any, *args: Any) -> None:
        """Run an operation of torch, timed."""
        begin = time.perf_counter_ns()
        _run_eagerly(function, *args)
        self._add(f"torch {function}", (time.perf_counter_ns() - begin) / 1e3)

    def _add(self, part: str, us: float) -> None:
        self.us[part] += us
        self.calls[part] += 1


_run_eagerly = compiled_step._eager


def part_of(call: Call) -> tuple[str, int]:
    """Name the kind of a call; return the bytes of the weights that it reads, too."""
    fields = call.fields
    if "*weights" in fields:
        outputs = fields["outputs"]
        if "parts" in fields:
            inputs, bits = fields["parts"] * GROUP, 4 + 2 * 16 / GROUP  # scale and zero point
        elif "pairs" in fields:
            inputs, bits = 2 * fields["pairs"], 8
        else:
            inputs, bits = fields["steps"] * (2 * LANES if "count" in fields else GEMV_LANES), 16
        return f"matrix {inputs} to {outputs}", int(inputs * outputs * bits / 8)
    for name, part in (("*mixed", "attention"), ("*normed", "norm"), ("*table", "activation")):
        if name in fields:
            return part, 0
    return ("elementwise" if "planes" in fields else "quantise rows"), 0


def ticks_per_us() -> float:
    """Measure the CPU's counter against the clock; what interrupts that makes the rate smaller."""
    x = torch.zeros(1 << 20)  # takes long beside what Python does before and after
    (call,) = calls_for(torch.ops.aten.add.Tensor, (x, x), {}, [x]) or []
    timed, rates = Timed(), list[float]()
    program = TimedProgram([call] * 20, timed.extend)
    for _ in range(STEPS):
        timed.clear()
        begin = time.perf_counter_ns()
        program.run()
        rates.append(1e3 * sum(spent for _, spent in timed) / (time.perf_counter_ns() - begin))
    return max(rates)


def measure(folder: Path, width: Quant, threads: int, sessions: int) -> list[Row]:
    """Time the parts of decode steps of sessions with the usual context."""
    torch.set_num_threads(threads)
    rate, step = ticks_per_us(), Step(1.0)
    found = defaultdict[str, list[float]](list)

    def timed(calls: Sequence[Call]) -> Program:
        return TimedProgram(calls, note)

    def note(spent: Timed) -> None:
        step.timed += spent

    def eagerly(function: Any, *args: Any) -> None:
        step.run_eagerly(function, *args)

    with patch.multiple(compiled_step, Program=timed, _eager=eagerly):
        engine = next(open_node(open_folder(folder.name, folder), width, CPU))
        forward = engine.begin(EngineTask("decode", sessions))
        for _ in range(STEPS):
            step, begin = Step(rate), time.perf_counter_ns()
            forward(torch.randint(3, 500, (sessions, 1)))
            whole = (time.perf_counter_ns() - begin) / 1e3
            step.count()
            step.us[OTHER] = whole - sum(step.us.values())
            for part, us in step.us.items():
                found[part].append(us)
            found[WHOLE].append(whole)
    best = {part: lower_quartile(spent) for part, spent in found.items()}
    return [
        Row(
            *(width, threads, sessions, part, step.calls[part], us, us / best[WHOLE]),
            step.bytes[part] / us / 1e3 if step.bytes[part] else None,
        )
        for part, us in sorted(best.items(), key=lambda item: -item[1])
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """Lay out rows."""
    kind = f"{'width':<6} {'threads':>7} {'sessions':>8} {'part':<28}"
    lines = [f"{kind} {'calls':>5} {'us':>9} {'share':>6} GB/s"]
    for row in rows:
        speed = f"{row.gb_per_s:.1f}" if row.gb_per_s else ""
        kind = f"{row.width:<6} {row.threads:7} {row.sessions:8} {row.part:<28}"
        lines.append(f"{kind} {row.calls:5} {row.us:9.1f} {row.share:6.1%} {speed}".rstrip())
    return lines


def main(args: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of("step", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--threads", type=counts, default=(1, 2))
    parser.add_argument("--sessions", type=counts, default=(1,))
    parser.add_argument("--quants", type=lambda text: [Quant(each) for each in text.split(",")])
    options = parser.parse_args(args)
    report, threads, memory = Report(options, 0), torch.get_num_threads(), probe()
    limits, rows = dict[int, float](), list[Row]()
    with (
        random_model(options.model, torch.bfloat16, options.layers) as folder,
        torch.inference_mode(),
        load_of_others() as others,
    ):
        for count in options.threads:
            for quant, sessions in product(options.quants or list(Quant), options.sessions):
                rows += measure(folder, quant, count, sessions)
            limits[count] = max(read_memory(memory) for _ in range(STEPS))
    torch.set_num_threads(threads)
    about = conditions(options, others, gb_per_s=limits)
    report.say(*(f"{name}: {value}" for name, value in about.items()), *table(rows))
    report.write(rows, **about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
