"""Rings beside llama.cpp over RPC: ``python -m tests.bench.peer_rings --llama FOLDER``.

Published dimensions, random weights, one machine. Both run the same number of processes with one
thread each, linked over loopback: nodes of a ring, encrypted, against servers of llama.cpp's RPC,
which is not. In every round each takes its turn at tokens behind the same prompt, in random order;
what is compared are medians. Needs the folder of ``llama-bench`` and ``ggml-rpc-server``, built
with RPC, and the package ``gguf``.
"""

import asyncio
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from meshllm.bench.fleet import Fleet, open_fleet
from meshllm.bench.ring_table import DIMENSIONS, NUMBER_TOKENS, WORD, random_model
from meshllm.names import Quant
from meshllm.request import Request
from tests.bench.conditions import conditions, load_of_others, progress
from tests.bench.gguf_file import write_gguf
from tests.bench.goals import LLAMA, MESHLLM, RINGS_LEAST, Verdict
from tests.bench.report import Report, parser_of

SERVER, BENCH = "ggml-rpc-server", "llama-bench"
RPC = f"{LLAMA} RPC"
START_S = 30.0  # s until a server of llama.cpp listens


@dataclass(frozen=True, slots=True)
class Row:
    """One width."""

    width: str
    nodes: int
    ms_per_token: float
    llama_ms_per_token: float
    ratio: float
    """Speed against llama.cpp."""


@contextmanager
def open_servers(programs: Path, nodes: int) -> Iterator[str]:
    """Start RPC servers with one thread each; yield their addresses as llama.cpp takes them."""
    ports = [_free_port() for _ in range(nodes)]
    quiet = subprocess.DEVNULL
    started = [
        subprocess.Popen(
            [programs / SERVER, "-t", "1", "-p", str(port)], stdout=quiet, stderr=quiet
        )
        for port in ports
    ]
    try:
        for port in ports:
            _await_port(port)
        yield ",".join(f"127.0.0.1:{port}" for port in ports)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _await_port(port: int) -> None:
    script = f"until (: > /dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.1; done"
    subprocess.run(["bash", "-c", script], check=True, timeout=START_S)


def command_of(file: Path, servers: str, options: Namespace) -> list[str]:
    """Return the arguments of llama.cpp's benchmark for tokens behind a prompt."""
    count = len(servers.split(","))
    devices = "/".join(f"RPC{number}" for number in range(count))
    sizes = ["-p", "0", "-n", str(options.new_tokens), "-d", str(options.prompt_tokens)]
    where = ["--rpc", servers, "-dev", devices, "-ngl", "99"]  # in this order
    return [BENCH, *where, "-m", str(file), "-t", "1", "-r", "1", *sizes, "-o", "json"]


def ms_of(text: str) -> float:
    """Read what the benchmark printed: milliseconds per token."""
    return 1e3 / float(json.loads(text)[-1]["avg_ts"])


@asynccontextmanager
async def line_up(
    folder: Path, quant: Quant, options: Namespace
) -> AsyncIterator[dict[str, Callable[[], Awaitable[float]]]]:
    """Open the ring and the servers of a width; yield what measures each, in ms per token."""
    file = folder / f"{quant}.gguf"
    write_gguf(folder, quant, file)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet(folder, options.nodes, 1, quant))
        servers = stack.enter_context(open_servers(options.llama, options.nodes))
        command = command_of(file, servers, options)
        numbers = iter(range(100))

        async def ring() -> float:
            return await _ask(fleet, next(numbers), options)

        async def llama() -> float:
            program = options.llama / command[0]
            done = await asyncio.create_subprocess_exec(
                program, *command[1:], stdout=asyncio.subprocess.PIPE
            )
            return ms_of((await done.communicate())[0].decode())

        yield {MESHLLM: ring, LLAMA: llama}
    file.unlink()


async def _ask(fleet: Fleet, number: int, options: Namespace) -> float:
    raw = f"{number:02} {WORD * (options.prompt_tokens - NUMBER_TOKENS)}"
    answer = await fleet.answer(Request(raw=raw, max_tokens=options.new_tokens))
    return answer.ms_per_token


async def measure(folder: Path, quant: Quant, options: Namespace) -> Row:
    """Let both take their turn in every round, after one to warm up."""
    found: dict[str, list[float]] = {}
    async with line_up(folder, quant, options) as peers:
        for number in range(options.rounds + 1):
            progress(f"{quant}, round {number} of {options.rounds}")
            for name in random.sample(list(peers), len(peers)):
                spent = await peers[name]()
                if number:
                    found.setdefault(name, []).append(spent)
    own, other = (statistics.median(found[name]) for name in (MESHLLM, LLAMA))
    return Row(quant, options.nodes, own, other, other / own)


def authorize(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Hold the rows against the goal."""
    for row in rows:
        yield Verdict(1, f"{row.nodes} processes", row.width, RPC, row.ratio, RINGS_LEAST)


def table(rows: Sequence[Row]) -> list[str]:
    """Lay out rows."""
    head = f"{'width':<6} {'processes':>9} {'ms/token':>9} {'llama.cpp RPC':>14} {'speed':>7}"
    return [head] + [
        f"{row.width:<6} {row.nodes:9} {row.ms_per_token:9.1f} {row.llama_ms_per_token:14.1f}"
        f" {row.ratio:6.2f}x"
        for row in rows
    ]


def parse(args: Sequence[str] | None = None) -> Namespace:
    """Parse the command line; end with an error if llama.cpp is not there."""
    parser = parser_of("peer_rings", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--quants", type=lambda text: [Quant(each) for each in text.split(",")])
    parser.add_argument("--llama", type=Path, help="folder of llama-bench and ggml-rpc-server")
    options = parser.parse_args(args)
    options.quants = options.quants or list(Quant)
    if options.llama is None:
        found = shutil.which(BENCH)
        if found is None:
            parser.error("llama.cpp is not on the PATH: name its folder with `--llama`")
        options.llama = Path(found).parent
    return options


def measure_all(options: Namespace) -> list[Row]:
    """Measure each width."""
    with random_model(options.model, torch.bfloat16, options.layers) as folder:
        return [asyncio.run(measure(folder, quant, options)) for quant in options.quants]


def main(args: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(args)
    report = Report(options, 1)
    with load_of_others() as others:
        rows = measure_all(options)
    about = conditions(options, others)
    goals = list(authorize(rows))
    lines = (f"{name}: {value}" for name, value in about.items())
    report.say(*lines, *table(rows), *map(str, goals))
    report.write(rows, **about, goals=goals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
