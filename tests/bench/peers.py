"""Side by side with transformers and llama.cpp: ``python -m tests.bench.peers [--quick]``.

Published dimensions, random weights, one machine. In every round each contestant takes its turn at
every task, in random order; what is compared are lower quartiles over the rounds, which the load of
other programs changes least, and that load is printed. Contestants are meshllm's engine with plain,
int8 and int4 weights, transformers, and llama.cpp with the same widths where ``llama-bench`` is in
``--llama FOLDER`` or on the PATH and the package ``gguf`` is installed. All of its matrices have
the format, also the table of tokens; several sessions need ``llama-batched-bench``. With its
``ggml-rpc-server``, rings of two processes follow, see `tests.bench.peer_rings`. At the end, ratios
are held against the `GOALS`.

``--cpu-time`` compares the CPU time of one thread, which does not grow while other programs have
the core. That of llama.cpp is what a longer run takes more than a shorter one; it is left out for
several sessions.
"""

import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from meshllm.bench.engine_table import probe, read_memory
from meshllm.bench.engines import CONTEXT, Engine, EngineTask, Forward, open_node, open_stock
from meshllm.bench.ring_table import DIMENSIONS, TRANSFORMERS, random_model
from meshllm.errors import ModelError
from meshllm.model.device import CPU
from meshllm.model.files.source import open_folder
from meshllm.names import Quant
from tests.bench import peer_rings
from tests.bench.conditions import conditions, load_of_others, lower_quartile, progress
from tests.bench.gguf_file import write_gguf
from tests.bench.goals import LLAMA, MESHLLM, Row, authorize
from tests.bench.report import Report, counts, parser_of

BENCH = "llama-bench"
STEPS = 8  # decode steps of a turn
MORE_STEPS = 64  # of a longer run of llama.cpp
MORE_PROMPTS = 4  # the same


class Peer(Protocol):
    """A contestant."""

    @property
    def name(self) -> str:
        """The program."""
        ...

    @property
    def width(self) -> str:
        """The quantisation, in our words."""
        ...

    @property
    def bytes(self) -> int:
        """Read by a step."""
        ...

    def seconds(self, task: EngineTask, threads: int) -> float | None:
        """Return the seconds of a prompt, or of a step; None if it does not take the task."""
        ...


@dataclass(slots=True)
class InProcess:
    """An engine of this process."""

    name: str
    width: str
    engine: Engine
    clock: Callable[[], float] = time.perf_counter
    _begun: dict[tuple[EngineTask, int], Forward] = field(default_factory=dict[Any, Any])

    @property
    def bytes(self) -> int:
        """Read by a step."""
        return self.engine.bytes

    def seconds(self, task: EngineTask, threads: int) -> float | None:
        """Run a prompt, or some steps, with so many threads of torch."""
        torch.set_num_threads(threads)
        if task.kind == "prefill":
            forward, times = self.engine.begin(task), 1
        else:
            if (task, threads) not in self._begun:
                self._begun[task, threads] = self.engine.begin(task)
            forward, times = self._begun[task, threads], STEPS
        spent = []
        for _ in range(times):
            ids = torch.randint(3, 500, task.shape)
            begin = self.clock()
            forward(ids)
            spent.append(self.clock() - begin)
        return statistics.median(spent)


@dataclass(frozen=True, slots=True)
class Llama:
    """llama.cpp, started for each turn."""

    width: str
    file: Path
    programs: Path
    has_cpu_time: bool = False
    """Whether to return CPU time."""
    name: str = LLAMA

    @property
    def bytes(self) -> int:
        """Read by a step: the whole file, as the table of tokens is the head, too."""
        return self.file.stat().st_size

    def seconds(self, task: EngineTask, threads: int) -> float | None:
        """Run its own benchmark once; None if that is not installed, or ends with an error."""
        try:
            return self._measure(task, threads)
        except subprocess.CalledProcessError as error:  # such as SIGILL
            message = error.stderr.strip().rpartition("\n")[2]
            print(f"no {task.name}, {self.width}: {error} {message}", file=sys.stderr)
            return None

    def _measure(self, task: EngineTask, threads: int) -> float | None:
        command = command_of(task, threads, self.file)
        if not (self.programs / command[0]).exists():
            return None
        if not self.has_cpu_time:
            return seconds_of(task, self._run(command)[0])
        if task.kind == "decode" and task.rows > 1:
            return None
        more = MORE_STEPS if task.kind == "decode" else MORE_PROMPTS
        _, longer = self._run(command_of(task, threads, self.file, more))
        return (longer - self._run(command)[1]) / more

    def _run(self, command: Sequence[str]) -> tuple[str, float]:
        """Run a program; return its output and its CPU time."""
        before = _children_s()
        done = subprocess.run(
            [self.programs / command[0], *command[1:]], capture_output=True, text=True, check=True
        )
        return done.stdout, _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_of(task: EngineTask, threads: int, file: Path, more: int = 0) -> list[str]:
    """Return the program of llama.cpp for a task, and its arguments.

    ``more`` is how many steps more to run, or how many times more to read the prompt.
    """
    common = ["-m", str(file), "-t", str(threads)]
    if task.kind == "prefill":
        times = str(1 + more)
        return [BENCH, *common, "-p", str(task.rows), "-n", "0", "-r", times, "-o", "json"]
    if task.rows == 1:
        steps, depth = str(STEPS + more), str(task.context)
        return [
            BENCH,
            *common,
            "-p",
            "0",
            "-n",
            steps,
            "-d",
            depth,
            "-r",
            "1",
            "-o",
            "json",
        ]
    room = str(task.rows * (task.context + STEPS))
    sizes = ["-c", room, "-npp", str(task.context), "-ntg", str(STEPS), "-npl", str(task.rows)]
    return ["llama-batched-bench", *common, "-tb", str(threads), *sizes, "--output-format", "jsonl"]


def seconds_of(task: EngineTask, text: str) -> float:
    """Read what a program of llama.cpp printed: the seconds of a prompt, or of a step."""
    if task.kind == "decode" and task.rows > 1:
        lines = [line for line in text.splitlines() if line.startswith("{")]
        return task.rows / float(json.loads(lines[-1])["speed_tg"])
    speed = float(json.loads(text)[-1]["avg_ts"])
    return (task.rows if task.kind == "prefill" else 1) / speed


Times = dict[tuple[int, EngineTask, str, str], list[float]]
"""Seconds by threads, task, width and name."""


def take_turns(
    peers: Sequence[Peer],
    tasks: Sequence[EngineTask],
    options: Namespace,
    report: Callable[[str], None],
) -> tuple[Times, dict[int, list[float]]]:
    """Let every contestant do every task in every round; return GB/s by threads, too."""
    times: Times = {}
    speeds: dict[int, list[float]] = {threads: [] for threads in options.threads}
    memory = probe()
    for number in range(options.rounds):
        for threads in options.threads:
            for task in tasks:
                report(f"round {number + 1} of {options.rounds}, {task.name}, {threads} threads")
                for peer in random.sample(list(peers), len(peers)):
                    if (spent := peer.seconds(task, threads)) is not None:
                        times.setdefault((threads, task, peer.width, peer.name), []).append(spent)
            torch.set_num_threads(threads)
            speeds[threads] += [read_memory(memory) for _ in range(3)]
    return times, speeds


def summarise(
    times: Times, sizes: dict[tuple[str, str], int], limits: dict[int, float]
) -> list[Row]:
    """Make rows of times, given the bytes of a step and the memory bandwidth in GB/s, if known."""
    best = {key: lower_quartile(spent) for key, spent in times.items()}

    def row(threads: int, task: EngineTask, width: str, name: str) -> Row:
        own = best[threads, task, width, name]
        stock = best.get((threads, task, Quant.NONE, TRANSFORMERS))
        llama = best.get((threads, task, width, LLAMA))
        limit = sizes[width, name] / limits[threads] / 1e9 if limits else 0.0
        return Row(
            *(threads, task.name, width, name, own * 1e3, task.rows / own),
            stock and stock / own,
            llama and llama / own,
            limit / own if limit and task.name == "decode 1" else None,
        )

    return [row(*key) for key in best]


def line_up(folder: Path, options: Namespace, report: Callable[[str], None]) -> Iterator[Peer]:
    """Load the contestants."""
    source = open_folder(folder.name, folder)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    yield InProcess(TRANSFORMERS, Quant.NONE, open_stock(source, CPU), clock)
    for quant in options.quants:
        report(f"loading {quant}")
        try:
            engine = next(open_node(source, quant, CPU))
        except ModelError as error:  # this machine has no kernel for it
            report(f"without {quant}: {error}")
            continue
        yield InProcess(MESHLLM, quant, engine, clock)
    if options.llama is None:
        return
    for quant in options.quants:
        report(f"writing {quant} for {LLAMA}")
        file = folder / f"{quant}.gguf"
        write_gguf(folder, quant, file)
        yield Llama(quant, file, options.llama, options.cpu_time)


def folder_of_llama(parser: ArgumentParser, wanted: Path | None) -> Path | None:
    """Return the folder of llama.cpp's programs, by default that on the PATH; None without any.

    Ends with an error if what is wanted cannot take part.
    """
    has_writer = find_spec("gguf") is not None
    if wanted is None:
        found = shutil.which(BENCH) if has_writer else None
        return Path(found).parent if found else None
    if not (wanted / BENCH).exists():
        parser.error(f"there is no `{BENCH}` in {wanted}")
    if not has_writer:
        parser.error(f"{LLAMA} needs the package `gguf` on the PYTHONPATH")
    return wanted


def table(rows: Sequence[Row]) -> list[str]:
    """Lay out rows, by task."""
    head = f"{'threads':>7} {'task':<14} {'width':<6} {'':<13} {'ms':>9} {'tok/s':>8}"
    lines = [f"{head} {'transformers':>13} {'llama.cpp':>10} {'limit':>6}"]
    order = {task: number for number, task in enumerate(dict.fromkeys(row.task for row in rows))}
    for row in sorted(
        rows, key=lambda each: (each.threads, order[each.task], each.width != "none")
    ):
        ratios = _ratio(row.of_transformers, 13), _ratio(row.of_llama, 10)
        limit = f"{row.of_limit:6.2f}" if row.of_limit else ""
        text = f"{row.threads:7} {row.task:<14} {row.width:<6} {row.name:<13} {row.ms:9.1f}"
        lines.append(f"{text} {row.tokens_per_second:8.1f} {' '.join(ratios)} {limit}".rstrip())
    return lines


def _ratio(value: float | None, width: int) -> str:
    return f"{value:{width - 1}.2f}x" if value else " " * width


def main(args: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of("peers", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--threads", type=counts, default=(1, 2))
    parser.add_argument("--prompts", type=counts, default=(256, 1024, 2048, 4096))
    parser.add_argument("--sessions", type=counts, default=(1, 8))
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before a new one")
    parser.add_argument("--rounds", type=int, help="default 5, 3 with --quick")
    parser.add_argument("--quants", type=lambda text: [Quant(each) for each in text.split(",")])
    parser.add_argument("--llama", type=Path, help="folder of llama-bench")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, see above")
    parser.add_argument("--quick", action="store_true", help="6 layers, prompts of 256, 1 thread")
    options = parser.parse_args(args)
    options.quants = options.quants or list(Quant)
    if options.quick:
        options.layers, options.prompts, options.threads = options.layers or 6, (256,), (1,)
    options.threads = (1,) if options.cpu_time else options.threads
    options.rounds = options.rounds or (3 if options.quick else 5)
    options.llama = folder_of_llama(parser, options.llama)
    report = Report(options, 0)
    tasks = [
        *(EngineTask("decode", count, options.context) for count in options.sessions),
        *(EngineTask("prefill", count) for count in options.prompts),
    ]
    threads = torch.get_num_threads()
    with (
        random_model(options.model, torch.bfloat16, options.layers) as folder,
        torch.inference_mode(),
        load_of_others() as others,
    ):
        peers = list(line_up(folder, options, progress))
        times, speeds = take_turns(peers, tasks, options, progress)
        sizes = {(peer.width, peer.name): peer.bytes for peer in peers}
    torch.set_num_threads(threads)
    limits = {count: statistics.median(found) for count, found in speeds.items()}
    rows = summarise(times, sizes, {} if options.cpu_time else limits)
    about = conditions(options, others, gb_per_s=limits)
    report.say(*(f"{name}: {value}" for name, value in about.items()), *table(rows))
    goals = list(authorize(rows))
    report.say(*map(str, goals))
    try:
        about |= ring_rows(options, {row.width for row in rows if row.name == MESHLLM}, report)
    finally:  # a ring may fail to form
        report.write(rows, **about, goals=goals)
    return 0


def ring_rows(options: Namespace, widths: Collection[str], report: Report) -> dict[str, object]:
    """Measure and print rings; return their rows, the goals, and the load of others."""
    with load_of_others() as others:
        if not (rings := measure_rings(options, widths)):
            return {}
    goals = list(peer_rings.authorize(rings))
    report.say(*peer_rings.table(rings), *map(str, goals))
    return {"rings": rings, "goals_of_rings": goals, "others_of_rings": others}


def measure_rings(options: Namespace, widths: Collection[str]) -> list[peer_rings.Row]:
    """Measure rings of two processes, unless llama.cpp has no RPC; not for quick looks."""
    has_servers = options.llama and (options.llama / peer_rings.SERVER).exists()
    if not (has_servers and widths) or options.quick or options.cpu_time:
        return []
    given = ["--model", options.model, "--llama", str(options.llama)]
    given += [] if options.layers is None else ["--layers", str(options.layers)]
    quants = ",".join(each for each in options.quants if each in widths)
    return peer_rings.measure_all(peer_rings.parse([*given, "--quants", quants]))


if __name__ == "__main__":
    sys.exit(main())
