"""The hit rate of the prefix cache under a replayed trace, against the one that was recorded.

``python -m tests.bench.trace_replay [--requests N] [--nodes N] [--rtt MS] [--speed X]``

Chats that share system prompts begin at random times, are answered by a ring of the embedded model
and recorded; the next turn of a chat follows after some seconds. Then a new ring answers the replay
of that trace. The clock is virtual: links take their time, computing takes none. The command fails
if the two hit rates differ by more than `POINTS`, or a request fails.
"""

import asyncio
import dataclasses
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from meshllm.bench.replay import LoadFigures, ReplayComparison, TraceReplay
from meshllm.bench.targets import BackendTarget
from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Answer, Backend, Request, Turn
from meshllm.testing.clock import run_virtual
from meshllm.traces.file import TraceFile
from meshllm.traces.recorder import Recorder
from meshllm.traces.trace import read_trace
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.bench.report import Report, parser_of

POINTS = 0.02  # of the hit rate
SYSTEMS = 6  # system prompts that chats share
MAX_TURNS = 5
CHATS_PER_S = 0.5
PAUSE_S = 10.0  # mean time from an answer to the next turn
WORDS = (
    "ring", "node", "layer", "token", "answer", "question", "river", "mountain", "machine",
    "winter", "story", "small", "great", "quick", "between", "after", "every", "carry", "begin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """What one user says, and when."""

    begin_s: float
    system: str
    said: tuple[str, ...]
    seed: int


def draw_chats(requests: int, seed: int) -> list[Chat]:
    """Draw chats with as many turns in total."""
    draw = Random(seed)
    systems = [_words(draw, 40, 160) for _ in range(SYSTEMS)]
    found: list[Chat] = []
    begin_s = 0.0
    while requests:
        turns = min(requests, draw.randint(1, MAX_TURNS))
        system = systems[min(int(draw.expovariate(0.5)), SYSTEMS - 1)]
        said = tuple(_words(draw, 4, 40) for _ in range(turns))
        found.append(Chat(begin_s, system, said, draw.getrandbits(32)))
        requests -= turns
        begin_s += draw.expovariate(CHATS_PER_S)
    return found


def _words(draw: Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


@asynccontextmanager
async def open_ring(nodes: int, rtt_s: float) -> AsyncIterator[LocalRing]:
    """Open a ring with an empty prefix cache."""
    inference = InferenceConfig(threads=1, speculation=False)
    transport = LoopbackTransport(TrafficShape(delay_s=rtt_s / 2))
    options = RingOptions(nodes, inference=inference)
    async with open_local_ring(resolve("builtin"), options, transport) as ring:
        yield ring


async def record(path: Path, chats: Sequence[Chat], nodes: int, rtt_s: float) -> None:
    """Hold the chats, and record their requests."""
    clock = asyncio.get_running_loop().time
    async with open_ring(nodes, rtt_s) as ring:
        with TraceFile.open(path) as file:
            backend = Recorder(file, clock).traced(ring, "builtin")
            async with asyncio.TaskGroup() as group:
                for each in chats:
                    group.create_task(_hold(backend, each))


async def _hold(backend: Backend, chat: Chat) -> None:
    draw = Random(chat.seed)
    turns = [Turn(role="system", content=chat.system)]
    await asyncio.sleep(chat.begin_s)
    for each in chat.said:
        turns.append(Turn(role="user", content=each))
        request = Request(turns=tuple(turns), max_tokens=draw.randint(4, 24))
        async with aclosing(backend.generate(request)) as events:
            answers = [event async for event in events if isinstance(event, Answer)]
        turns += [Turn(role="assistant", content=each.text) for each in answers]
        await asyncio.sleep(draw.expovariate(1 / PAUSE_S))


async def replay(path: Path, nodes: int, rtt_s: float, speed: float = 1.0) -> ReplayComparison:
    """Replay a trace on a new ring."""
    async with open_ring(nodes, rtt_s) as ring:
        lines = [dataclasses.replace(each, model="") for each in read_trace(path)]
        return await TraceReplay(lines, BackendTarget(ring), speed).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of("trace_replay", __doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rtt", type=float, default=20, help="milliseconds")
    parser.add_argument("--speed", type=float, default=1.0)
    options = parser.parse_args(arguments)
    report = Report(options, threads=1)
    found = measure(options)
    report.say(f"{found.compared} of {found.requests} requests", *_lines(found))
    report.write([found], requests=options.requests, speed=options.speed)
    apart = abs(found.trace.hit_rate - found.replay.hit_rate)
    return int(apart > POINTS or bool(found.errors))


def measure(options: Namespace) -> ReplayComparison:
    """Record chats, and replay them."""
    chats = draw_chats(options.requests, seed=1)
    ring = options.nodes, options.rtt / 1e3
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        run_virtual(record(path, chats, *ring))
        return run_virtual(replay(path, *ring, options.speed))


def _lines(found: ReplayComparison) -> list[str]:
    return [_line("trace", found.trace), _line("replay", found.replay), *found.errors]


def _line(name: str, load: LoadFigures) -> str:
    ttft, token = (each.p50 if each else 0.0 for each in (load.ttft_ms, load.token_ms))
    return (
        f"{name:<8}{load.prompt_tokens:>9} prompt {load.new_tokens:>7} new tokens,"
        f" hit rate {load.hit_rate:7.2%}, TTFT {ttft:6.1f} ms, {token:5.2f} ms per token,"
        f" {load.tokens_per_second:6.1f} tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main())
