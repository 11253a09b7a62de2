"""The simulator of workloads against real rings: ``python -m tests.bench.predicted``.

Every placement is a ring of processes on this machine, one thread each, of a model with random
weights. Requests arrive at random at each share of the capacity that is predicted for the first
placement, so that all have the same loads. The simulator gets the same requests, the spans and
links of the ring, and the cost table of this machine: the mean of one before and one after each
load, as shared machines change by the minute. Ranks on one machine share its memory bandwidth: how
much steps at once slow each other down is measured, too.

The last line has the median error of the mean times, and how many pairs of placements the simulator
puts into the order that was measured: of the mean time of a request under one load. It needs a core
for each process, and a quiet machine.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from threading import Barrier

import torch

from meshllm.bench.fleet import Fleet, open_fleet
from meshllm.bench.ring_table import NUMBER_TOKENS, WORD, random_model
from meshllm.model.capacity import shape_of
from meshllm.model.files.source import Source, resolve
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.trial import run_untested
from meshllm.model.timing import Speed, measure_speed
from meshllm.names import NODE_ID_BYTES, NodeId, Quant, Span
from meshllm.node.ring.shape import plan_shape
from meshllm.protocol.planning.chunking import ring_times
from meshllm.protocol.planning.plan import (
    Ends,
    Links,
    LinkSpeed,
    ModelSizes,
    Offer,
    Plan,
    PlanStage,
)
from meshllm.request import Request
from meshllm.scheduler.engine import ReplicaEngine
from meshllm.scheduler.estimate import Estimate
from meshllm.scheduler.load import Lengths, ModelLoad, sample
from meshllm.scheduler.simulator import Arrival, SimulatedReplica, simulate
from meshllm.status import MeshStatus, from_json
from tests.bench.report import Report, counts, parser_of

DTYPE = torch.bfloat16
NUMBER_DIGITS = 3  # one more than `NUMBER_TOKENS` counts
STEPS = 40  # of each rank, to see how much ranks slow each other down
SAME = 0.05  # of a time: pairs of placements that are closer have no order


@dataclass(frozen=True, slots=True)
class Predicted:
    """One placement under one load; mean times in milliseconds."""

    nodes: int
    quant: Quant
    share: float
    """Of the capacity that is predicted for the first placement."""
    ttft_ms: float
    simulated_ttft_ms: float
    token_ms: float
    simulated_token_ms: float

    request_ms: float
    simulated_request_ms: float

    @property
    def errors(self) -> tuple[float, float]:
        return (
            abs(self.simulated_ttft_ms / self.ttft_ms - 1),
            abs(self.simulated_token_ms / self.token_ms - 1),
        )


@dataclass(frozen=True, slots=True)
class Case:
    """What all placements have in common."""

    source: Source
    prompt: int
    tokens: int
    requests: int
    shares: tuple[float, ...]

    @property
    def load(self) -> ModelLoad:
        answers = Lengths((max(2, self.tokens // 2), self.tokens + self.tokens // 2))
        return ModelLoad(1.0, Lengths((self.prompt,)), answers)


async def measure(
    case: Case, nodes: int, quant: Quant, capacity: float | None
) -> tuple[list[Predicted], float]:
    """Run all loads on one ring: shares of ``capacity``, None for its own; return both."""
    rows = []
    slowed = contention(case.source, nodes, quant) if nodes > 1 else 1.0
    async with open_fleet(case.source.folder, nodes, 1, quant) as fleet:
        status = from_json(MeshStatus, (await fleet.entry.get("/mesh/status")).json())
        speed = speed_now(case.source, quant)
        sent = engine_of(status, case, quant, speed, slowed).max_sessions
        await warm_up(fleet, case, sent)
        for number, share in enumerate(case.shares, start=1):
            engine = engine_of(status, case, quant, speed, slowed)
            capacity = capacity or Estimate(engine, case.load).capacity
            rate = share * capacity
            load = ModelLoad(rate, case.load.prompt, case.load.answer)
            asked = sample([load], case.requests, seed=number)
            times = await replay(fleet, asked, sent)
            sent += len(asked)
            before, speed = speed, speed_now(case.source, quant)
            engine = engine_of(status, case, quant, mean_of(before, speed), slowed)
            run = simulate([SimulatedReplica(0, engine)], asked).latencies(0)
            columns = zip(*times, strict=True)
            ttft_ms, token_ms, request_ms = (fmean(column) for column in columns)
            rows.append(
                Predicted(
                    nodes,
                    quant,
                    share,
                    ttft_ms,
                    run.ttft_s[0] * 1e3,
                    token_ms,
                    run.token_s[0] * 1e3,
                    request_ms,
                    run.total_s[0] * 1e3,
                )
            )
    assert capacity is not None  # there are shares
    return rows, capacity


async def warm_up(fleet: Fleet, case: Case, sessions: int) -> None:
    """Run batches of each number of sessions, which are traced at first."""
    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            tokens = case.tokens + 2 * STEPS_BEFORE_REPLAY * number  # they end one after the other
            asked = Request(raw=raw(number, case.prompt), max_tokens=tokens)
            group.create_task(fleet.answer(asked))


def speed_now(source: Source, quant: Quant) -> Speed:
    """Return the cost table of this machine, measured again."""
    with TemporaryDirectory() as cache:
        return measure_speed(source, DTYPE, Path(cache), quant)


def mean_of(one: Speed, other: Speed) -> Speed:
    """Return the mean of two cost tables."""
    pairs = zip(one.layer_s, other.layer_s, strict=False)
    table = tuple((rows, fmean((first, second))) for (rows, first), (_, second) in pairs)
    return Speed(table, fmean((one.head_s, other.head_s)))


def contention(source: Source, nodes: int, quant: Quant) -> float:
    """Return how many times as long steps of so many ranks take at once, as in turn."""
    layers = int(source.config.num_hidden_layers)
    spans = [Span(layers * at // nodes, layers * (at + 1) // nodes) for at in range(nodes)]
    runners = [
        Runner(load_shard(source, span, embed=False, head=False, quant=quant), (1,), run_untested)
        for span in spans
    ]

    width = runners[0].shard.model.config.hidden_size
    row = torch.ones(1, 1, width, dtype=DTYPE)

    def seconds(runner: Runner, start: Barrier | None = None) -> float:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode():
            cache = runner.new_cache()
            for _ in range(1 + STEPS_BEFORE_REPLAY):
                runner.step(row, cache)
            if start is not None:
                start.wait()
            begin = time.perf_counter()
            for _ in range(STEPS):
                runner.step(row, cache)
            return time.perf_counter() - begin

    def ratio(pool: ThreadPoolExecutor) -> float:
        start = Barrier(nodes)
        return sum(pool.map(partial(seconds, start=start), runners)) / sum(map(seconds, runners))

    with ThreadPoolExecutor(nodes) as pool:
        return max(1.0, median(ratio(pool) for _ in range(3)))


def engine_of(
    status: MeshStatus, case: Case, quant: Quant, speed: Speed, slowed: float = 1.0
) -> ReplicaEngine:
    """Describe a running ring by its spans and links, and the speed of this machine."""
    sizes = plan_shape(shape_of(case.source, DTYPE, quant))
    stages, predicted = status.ring.stages, status.ring.predicted
    assert predicted is not None
    nodes = [NodeId(at.to_bytes(NODE_ID_BYTES)) for at in range(len(stages))]
    offers = [Offer(node, 1 << 40, speed.layer_s, speed.head_s) for node in nodes]
    links = Links(
        {
            (node, nodes[(at + 1) % len(nodes)]): LinkSpeed(hop.wire_ms / 1e3)
            for at, (node, hop) in enumerate(zip(nodes, predicted.hops, strict=True))
        }
    )
    spans = tuple(PlanStage(node, stage.layers) for node, stage in zip(nodes, stages, strict=True))
    times = ring_times(Plan(1, sizes.name, Ends.ENTRY, spans), offers, links, sizes)
    rooms = [stage.room_tokens for stage in stages if stage.room_tokens is not None]
    return ReplicaEngine(
        times,
        [len(stage.layers) * cached_s(sizes, speed) for stage in stages],
        room_tokens=min(rooms),
        chunk=times.best_pace(case.prompt, others=1).chunk,
        max_sessions=times.best_sessions,
        contention=slowed,
    )


def cached_s(sizes: ModelSizes, speed: Speed) -> float:
    """Return the seconds of one cached token in one layer, read as fast as weights."""
    return speed.layer_s[0][1] * sum(sizes.kv_bytes_per_token) / sum(sizes.layer_bytes)


async def replay(
    fleet: Fleet, asked: Sequence[Arrival], first: int
) -> list[tuple[float, float, float]]:
    """Send requests when they arrive.

    Return the milliseconds to the first token, per further token, and of all of each.
    """
    began = time.perf_counter()

    async def one(number: int, each: Arrival) -> tuple[float, float, float]:
        await asyncio.sleep(max(0.0, began + each.at_s - time.perf_counter()))
        asked = Request(raw=raw(first + number, each.prompt), max_tokens=each.answer)
        answer = await fleet.answer(asked)
        whole_ms = answer.ttft_ms + answer.ms_per_token * (each.answer - 1)
        return answer.ttft_ms, answer.ms_per_token, whole_ms

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*each)) for each in enumerate(asked)]
    return [task.result() for task in tasks]


def raw(number: int, tokens: int) -> str:
    """Return a prompt that begins like no other, so that no prefix is cached."""
    assert 0 <= number < 10**NUMBER_DIGITS, "as many prompts are different"
    return f"{number:0{NUMBER_DIGITS}} {WORD * (tokens - NUMBER_TOKENS - 1)}"


def order(rows: Sequence[Predicted]) -> tuple[int, int]:
    """Return how many pairs of placements under the same load are in the right order, of all."""
    right = total = 0
    for one, other in combinations(rows, 2):
        measured = one.request_ms / other.request_ms
        if one.share == other.share and abs(measured - 1) > SAME:
            total += 1
            right += (one.simulated_request_ms < other.simulated_request_ms) == (measured < 1)
    return right, total


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = parser_of("predicted", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--nodes", type=counts, default=(1, 2, 3))
    parser.add_argument("--quant", default="none,int8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, in the mean")
    parser.add_argument(
        "--requests",
        type=int,
        default=20,
        help="of each load, up to 4 times if few",
    )
    parser.add_argument(
        "--shares", default="0.2,0.5,0.8", help="of the capacity predicted for the first placement"
    )
    options = parser.parse_args(arguments)
    report, rows, capacity = Report(options, threads=1), list[Predicted](), None
    report.say("nodes  quant  share  first token ms  simulated  ms per token  simulated")
    torch.set_num_threads(1)
    with random_model(options.model, DTYPE) as folder:
        shares = tuple(float(share) for share in options.shares.split(","))
        source = resolve(str(folder))
        case = Case(source, options.prompt, options.tokens, options.requests, shares)
        for quant in map(Quant, options.quant.split(",")):
            for nodes in options.nodes:
                found, capacity = asyncio.run(measure(case, nodes, quant, capacity))
                for row in found:
                    rows.append(row)
                    report.say(
                        f"{row.nodes:>5}  {row.quant:>5}  {row.share:>5}  {row.ttft_ms:>14.1f}"
                        f"  {row.simulated_ttft_ms:>9.1f}  {row.token_ms:>12.2f}"
                        f"  {row.simulated_token_ms:>9.2f}"
                    )
    first, token = (median(column) for column in zip(*(row.errors for row in rows), strict=True))
    right, total = order(rows)
    report.say(
        f"median error {first:.0%} of the first token, {token:.0%} of a token;"
        f" {right} of {total} pairs in the measured order"
    )
    report.write(rows, ttft_error=first, token_error=token, right=right, pairs=total)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
