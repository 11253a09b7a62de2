"""The parity tests under emulated processors: ``python -m tests.bench.parity_processors``.

For each processor that this one can pass for, a process of its own runs the tests of parity and of
the kernels, and verifies models of odd shapes in the way of `meshllm model verify`. Libraries are
limited by their environment variables, the compiler of the own kernels by another name of the CPU.
A library that does not know its variable runs as usual.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshllm.model.kernels import jit
from meshllm.model.parity.check import verify
from tests.bench.report import Report, parser_of
from tests.builders.odd_shapes import ODD_SHAPES, odd_model

NAME = "parity_processors"
TESTS = ("tests/model/parity", "tests/model/kernels")
REAL = "not instructions_are_those_that_linux_lists"
"""Of the tests, those that are not of the real processor."""
KEPT = "not name_of_the_cpu"
"""Those that do not test the function that names the CPU, which is replaced here."""
ROW = "{:<16} {:>6} {:>6} {:>8}"


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor to pass for."""

    needs: str = ""
    """The feature that the real one must have, as LLVM calls it; empty for none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Limits the libraries."""
    own: tuple[str, str] | None = None
    """LLVM's name and features of the CPU for the own kernels; None for the real ones."""


V2 = "x86-64-v2", "+sse4.2,-avx,-avx2,-fma,-avx512f"
V3 = "x86-64-v3", "+avx2,+fma,-avx512f"
PROCESSORS = {
    "as it is": Processor(),
    "torch default": Processor("sse4.2", {"ATEN_CPU_CAPABILITY": "default"}),
    "torch AVX2": Processor("avx2", {"ATEN_CPU_CAPABILITY": "avx2"}),
    "torch AVX-512": Processor("avx512f", {"ATEN_CPU_CAPABILITY": "avx512"}),
    "oneDNN SSE4.1": Processor("sse4.1", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "oneDNN AVX2": Processor("avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "oneDNN AVX-512": Processor("avx512f", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "oneDNN bf16": Processor("avx512bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    "oneDNN AMX": Processor("amx-bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}),
    "oneMKL any": Processor("sse4.2", {"MKL_CBWR": "COMPATIBLE"}),
    "oneMKL AVX2": Processor("avx2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    "own AVX2": Processor("avx2", own=V3),
    "own SSE4.2": Processor("sse4.2", own=V2),
    "all AVX2": Processor(
        "avx2",
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
        V3,
    ),
    "all SSE4": Processor(
        "sse4.2",
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_CBWR": "COMPATIBLE",
        },
        V2,
    ),
}


@dataclass(slots=True)
class Outcomes:
    """Counts what tests and models come to; a plugin of pytest."""

    equal: int = 0
    skipped: int = 0
    unequal: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once."""
        if report.failed:
            self.unequal.append(report.nodeid)
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.equal += 1

    def verify(self, names: Sequence[str]) -> None:
        """Verify models of odd shapes."""
        for name in names:
            for dtype in (torch.float32, torch.bfloat16):
                with odd_model(name, dtype) as source:
                    report = verify(source, prompt=range(3, 10))
                if report.equal:
                    self.equal += 1
                else:
                    self.unequal.append(f"{name} {report.dtype}: {report.relative:.1e}")


@dataclass(frozen=True, slots=True)
class Row:
    """A processor, and what everything came to; nothing if this one cannot pass for it."""

    processor: str
    outcomes: Outcomes | None


def measure(processor: Processor, tests: Sequence[str], shapes: Sequence[str]) -> Outcomes:
    """Run everything in this process, whose environment is that of the processor."""
    outcomes, own = Outcomes(), processor.own or jit.processor()
    jit.private_folder.cache_clear()  # that of the user: tests have their own
    torch.set_num_threads(1)
    with patch.object(jit, "processor", lambda: own):
        if tests:
            kept = f"{KEPT} and {REAL}" if processor.own else KEPT
            command = ["-q", "-p", "no:cacheprovider", "--tb=line", "--assert=plain", *tests]
            command += ["-k", kept]
            pytest.main(command, plugins=[outcomes])
        outcomes.verify(shapes)
    return outcomes


def measure_apart(name: str, tests: Sequence[str], shapes: Sequence[str]) -> Outcomes:
    """Measure in a process of its own: libraries read their environment once."""
    what = "--tests", *tests, "--shapes", *shapes
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{NAME}", "--inside", name, *what],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **PROCESSORS[name].environment},
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        return Outcomes(unequal=[f"the process ended with status {done.returncode}"])
    return Outcomes(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and what is not equal; return 1 unless everything is equal."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--only", help="these processors, separated by commas")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files of tests, or none")
    parser.add_argument("--shapes", nargs="*", default=list(ODD_SHAPES), help="of models, or none")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        outcomes = measure(PROCESSORS[options.inside], options.tests, options.shapes)
        print(json.dumps(asdict(outcomes)))
        return 0
    report, rows = Report(options, threads=1), list[Row]()
    report.say(ROW.format("processor", "equal", "not", "skipped"))
    for name in options.only.split(",") if options.only else PROCESSORS:
        if (needs := PROCESSORS[name].needs) and not jit.has_cpu_feature(needs):
            report.say(f"{name:<16} this processor has no {needs}")
            rows.append(Row(name, None))
            continue
        found = measure_apart(name, options.tests, options.shapes)
        report.say(ROW.format(name, found.equal, len(found.unequal), found.skipped))
        for each in found.unequal:
            report.say(f"    {each}")
        rows.append(Row(name, found))
    report.write(rows)
    tried = [row.outcomes for row in rows if row.outcomes]
    return int(any(each.unequal or not each.equal for each in tried))


if __name__ == "__main__":
    sys.exit(main())
