"""Time to first token (TTFT) of a ring for long prompts, with whole and chunked prefill.

``python -m tests.bench.ttft [--model NAME] [--nodes N] [--prompts 128,256,512,1024,2048]
[--rtt MS] [--mbit RATE] [--wire plain,exact,int8] [--quant int8] [--layers N]``

All ranks run in this process, each on its own thread with one core. Each prompt passes the ring in
turns as a whole and in chunks, of the best size for the measured time of a layer; no two prompts
share a prefix. Ratios are medians over rounds of ratios inside a round. A model with fewer layers
shows the value of a wire mode on machines that are faster by that factor.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.capacity import shape_of
from meshllm.model.files.source import Source, open_folder
from meshllm.model.timing import measure_speed
from meshllm.model.wire.int8_rows import encoded_size
from meshllm.names import Quant, WireMode
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.ring.shape import plan_shape
from meshllm.protocol.planning.chunking import RingTimes, ring_times
from meshllm.protocol.planning.plan import Links, LinkSpeed, Offer
from meshllm.protocol.session.compression import PACKED, pays
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.request import Sampling
from meshllm_loopback import LoopbackTransport, TrafficShape

CHUNK_ROWS = 64  # chunks of this many rows are compressed as all chunks are
PLACES = 400  # range of the first tokens, which make prompts unique; in each vocabulary


@dataclass(frozen=True, slots=True)
class Row:
    """Prompts of one length with one wire mode; medians in milliseconds."""

    tokens: int
    wire: str
    whole_ms: float
    chunk: int
    """Rows of a chunk."""
    chunked_ms: float
    predicted_ms: float
    """Prediction for the chunked prompt."""
    ratio: float
    """Time of the whole prompt divided by that in chunks."""
    gain: float
    """Time of the chunked prompt with the first wire mode divided by that with this one."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A ring with one wire mode, and the measured time of a layer."""

    wire: WireMode
    ring: LocalRing
    times: RingTimes

    async def first_token_s(self, pace: PrefillPacing, tokens: int, number: int) -> float:
        """Generate the first token after a prompt that is unique to ``number``."""
        self.ring.entry.pace = lambda *_: pace
        rest = ((7 * place + 3) % 500 for place in range(tokens - 2))
        prompt = number % PLACES, number // PLACES, *rest
        begin = perf_counter()
        async for _ in self.ring.tokens(prompt, Sampling(), 1):
            return perf_counter() - begin
        raise AssertionError


async def measure(source: Source, options: argparse.Namespace) -> list[Row]:
    """Measure each prompt in turns, whole and in chunks, with each wire mode."""
    way = LinkSpeed(options.rtt / 2e3, options.mbit * 1e6 / 8)
    wires = [WireMode(name) for name in options.wire.split(",")]
    prompts = [int(tokens) for tokens in options.prompts.split(",")]
    numbers, rows = count(), list[Row]()
    async with AsyncExitStack() as stack:
        rings = [await _open(stack, source, wire, way, options) for wire in wires]
        for ring in rings:  # warm-up
            await ring.first_token_s(PrefillPacing(), min(prompts), next(numbers))
        for tokens in prompts:
            runs = [
                (ring, pace, list[float]())
                for ring in rings
                for pace in (PrefillPacing(chunk=tokens, window=1), ring.times.best_pace(tokens))
            ]
            for round_ in range(options.rounds):
                for ring, pace, run in runs if round_ % 2 else reversed(runs):
                    run.append(await ring.first_token_s(pace, tokens, next(numbers)))
            rows += _reduce(tokens, rings, [run for _, _, run in runs])
            if not options.json:
                _print(rows[-len(rings) :], is_first=len(rows) == len(rings))
    return rows


async def _open(
    stack: AsyncExitStack, source: Source, wire: WireMode, way: LinkSpeed, asked: argparse.Namespace
) -> Contestant:
    """Form a ring, and measure the time of a layer on its first rank."""
    transport = LoopbackTransport(TrafficShape(way.latency_s, bytes_per_s=way.bytes_per_s))
    quant = Quant(asked.quant)
    options = RingOptions(
        nodes=asked.nodes,
        own_threads=True,
        inference=InferenceConfig(
            threads=1, speculation=False, wire=wire, prefix_bytes=0, quant=quant
        ),
    )
    ring = await stack.enter_async_context(open_local_ring(source, options, transport))
    folder = Path(stack.enter_context(TemporaryDirectory()))  # no stored measurements
    speed = await ring.worker.run(measure_speed, source, torch.bfloat16, folder, quant)
    offers = [Offer(stage.node, 0, speed.layer_s, speed.head_s) for stage in ring.plan.stages]
    shape = plan_shape(shape_of(source))
    times = ring_times(ring.plan, offers, Links({}, way), shape)
    if wire is WireMode.INT8:
        times = replace(times, row_bytes=encoded_size((shape.hidden_size,)))
    if wire is WireMode.EXACT and pays(CHUNK_ROWS * times.row_bytes, way.bytes_per_s):
        times = replace(times, row_bytes=round(PACKED * times.row_bytes))
    return Contestant(wire, ring, times)


def _reduce(tokens: int, rings: Sequence[Contestant], runs: Sequence[list[float]]) -> list[Row]:
    """Summarise the runs of each ring, whole and chunked in turns."""
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    paces = [ring.times.best_pace(tokens) for ring in rings]
    return [
        Row(
            tokens=tokens,
            wire=str(ring.wire),
            whole_ms=statistics.median(whole) * 1e3,
            chunk=pace.chunk,
            chunked_ms=statistics.median(chunked) * 1e3,
            predicted_ms=ring.times.first_token_s(tokens, pace) * 1e3,
            ratio=_ratio(whole, chunked),
            gain=_ratio(runs[1], chunked),
        )
        for ring, pace, (whole, chunked) in zip(rings, paces, pairs, strict=True)
    ]


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def _print(rows: Sequence[Row], *, is_first: bool) -> None:
    line = "{:>7} {:>6} {:>9} {:>6} {:>11} {:>13} {:>7} {:>11}".format
    if is_first:
        names = "whole ms", "chunk", "chunked ms", "predicted ms", "ratio", "wire ratio"
        print(line("tokens", "wire", *names))
    for row in rows:
        times = f"{row.chunked_ms:.0f}", f"{row.predicted_ms:.0f}"
        ratios = f"{row.ratio:.2f}x", f"{row.gain:.2f}x"
        print(line(row.tokens, row.wire, f"{row.whole_ms:.0f}", row.chunk, *times, *ratios))
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ttft", description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--prompts", default="128,256,512,1024,2048", help="tokens of each")
    parser.add_argument("--rtt", type=float, default=0, help="round trip in milliseconds")
    parser.add_argument("--mbit", type=float, default=inf, help="rate in Mbit/s")
    parser.add_argument("--wire", default="exact", help="wire modes; the first is the baseline")
    parser.add_argument("--quant", default="none", choices=[*Quant], help="of the weights")
    parser.add_argument("--layers", type=int, help="layers of the model; as published by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with random_model(options.model, torch.bfloat16, options.layers) as folder:
        rows = asyncio.run(measure(open_folder(options.model, folder), options))
    if options.json:
        print(
            json.dumps(
                {
                    "model": options.model,
                    "layers": options.layers,
                    "rows": [asdict(row) for row in rows],
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
