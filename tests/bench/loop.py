"""Latency of the event loop of a computing process, compared with an idle one.

``python -m tests.bench.loop [--layers N] [--trips N]``

A separate process echoes 4 KiB over a WebSocket link; its other thread is idle, or decodes with
layers of the widths of Qwen3-0.6B and random weights on one core, or runs pure Python. Such a
thread holds the GIL, and the event loop waits for it up to the switch interval of Python, 5 ms by
default. The command fails if the 99th percentile during decode exceeds `P99_MS` with the interval
that a node sets. It needs two free cores: on a busy machine, compare with the first row.
"""

import argparse
import asyncio
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from time import perf_counter

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3Model

from meshllm.errors import LinkLost
from meshllm.transport.contract import Link
from meshllm_websocket import WebsocketTransport
from tests.bench.report import Report, parser_of

P99_MS = 3.0
MESSAGE_BYTES = 4096
PAUSE_S = 0.002
"""Pause between two trips: a busy loop never releases the GIL for long."""
CONTEXT = 256
NODE_INTERVAL_S = 0.0005
CASES = [
    ("rest", 0.005),
    ("decode", 0.005),
    ("decode", NODE_INTERVAL_S),
    ("python", 0.005),
    ("python", NODE_INTERVAL_S),
]
"""Work of the other thread, and the switch interval in seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """Round trips during some work, in milliseconds."""

    work: str
    interval_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def rest(_layers: int, ready: Event, _stop: Event) -> None:
    """Do nothing."""
    ready.set()


def python(_layers: int, ready: Event, stop: Event) -> None:
    """Hold the GIL, as rendering a long prompt does."""
    ready.set()
    while not stop.is_set():
        sum(range(1000))


def decode(layers: int, ready: Event, stop: Event) -> None:
    """Decode one row after another until ``stop`` is set."""
    torch.set_num_threads(1)
    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1024,
    )
    model = Qwen3Model(config).eval()
    row = torch.zeros(1, 1, config.hidden_size)
    with torch.inference_mode():
        while not stop.is_set():
            cache = DynamicCache(config=config)
            for _ in range(CONTEXT):
                model(inputs_embeds=row, past_key_values=cache, use_cache=True)
                ready.set()
                if stop.is_set():
                    return


WORK = {work.__name__: work for work in (rest, decode, python)}


async def serve(work: str, layers: int) -> None:
    """Echo on one link while another thread works."""
    ready, stop = Event(), Event()
    thread = Thread(target=WORK[work], args=(layers, ready, stop))
    thread.start()
    await asyncio.to_thread(ready.wait)
    async with WebsocketTransport().listen("ws://127.0.0.1:0") as listener:
        print(listener.address, flush=True)
        link = await anext(listener.links())
        with suppress(LinkLost):
            while True:
                channel, message = await link.receive()
                await link.send([message], channel)
        await link.close()
    stop.set()
    thread.join()


@asynccontextmanager
async def linked(work: str, layers: int, interval_s: float) -> AsyncIterator[Link]:
    command = ["-m", "tests.bench.loop", "--serve", work, "--interval", str(interval_s)]
    process: Process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--layers", str(layers), stdout=PIPE
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    link = await WebsocketTransport().dial(address)
    try:
        yield link
    finally:
        await link.close()
        await process.wait()


async def trips(link: Link, times: int) -> list[float]:
    """Return the milliseconds of each trip."""
    spent = []
    for _ in range(times):
        await asyncio.sleep(PAUSE_S)
        began = perf_counter()
        await link.send([bytes(MESSAGE_BYTES)])
        await link.receive()
        spent.append((perf_counter() - began) * 1e3)
    return spent


async def measure(layers: int, times: int, report: Report) -> list[Row]:
    """Measure and print each case."""
    report.say(f"{'work':<8}{'interval ms':>12}{'p50 ms':>8}{'p99 ms':>8}{'max ms':>8}")
    rows: list[Row] = []
    for work, interval_s in CASES:
        async with linked(work, layers, interval_s) as link:
            await trips(link, 20)
            spent = await trips(link, times)
        p50, p99 = statistics.median(spent), statistics.quantiles(spent, n=100)[-1]
        rows.append(Row(work, interval_s, p50, p99, max(spent)))
        figures = f"{p50:>8.2f}{p99:>8.2f}{max(spent):>8.2f}"
        report.say(f"{work:<8}{interval_s * 1e3:>12}{figures}")
    return rows


def main() -> None:
    parser = parser_of("loop", "Measure the latency of the event loop of a computing process.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--trips", type=int, default=1000)
    parser.add_argument("--serve", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--interval", type=float, default=0.005, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.serve is not None:
        sys.setswitchinterval(arguments.interval)
        asyncio.run(serve(arguments.serve, arguments.layers))
        return
    report = Report(arguments)
    rows = asyncio.run(measure(arguments.layers, arguments.trips, report))
    report.write(rows, layers=arguments.layers, trips=arguments.trips)
    case = ("decode", NODE_INTERVAL_S)
    if any(row.p99_ms > P99_MS for row in rows if (row.work, row.interval_s) == case):
        sys.exit(f"More than {P99_MS} ms")


if __name__ == "__main__":
    main()
