"""What recomputing the caches of lost layers costs: ``python -m tests.bench.recompute``.

The first table has the CPU time of a row in a layer, by part, of random models, on one thread: of
decode steps, `MAX_ROWS` at a time as drafts are verified and `RECOMPUTED_ROWS` as after a loss,
and of chunks of a prompt. All have the same rows, behind nothing. Of a part, only its share of the
time counts, as timing each call takes time too. The last column is the least that the matrices can
take: their products at the rate of the fastest of them.

The second table has the CPU time of rings of three in this process, over all nodes: to the first
token of a prompt, and from the loss of the middle rank to the next token, whose layers the others
share. The links are in memory, so that nothing is encrypted. That time includes loading the layers,
which weighs the more the smaller the model is. Of several losses, the one with the median ratio is
shown. These run first, as what earlier ones left in memory makes loading slower.

The third table has the same if the middle rank leaves instead and hands its KV caches over: the CPU
time until the others have loaded its layers and taken the caches, while the ring goes on; the bytes
of the caches, and how long a link of `LINK_MBIT` takes for them; and the CPU time from then to the
next token.
"""

import asyncio
import gc
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshllm.bench import ring_table
from meshllm.errors import LinkLost
from meshllm.model.files.source import open_folder
from meshllm.model.kernels import attention, flash_attention
from meshllm.model.kernels.gemm_bf16 import Bf16Matrix
from meshllm.model.modules import rms_norm
from meshllm.model.modules.linear_bf16 import MAX_ROWS, CompiledLinear
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import RECOMPUTED_ROWS, InvariantSteps, ReplayedSteps
from meshllm.names import Span
from meshllm.node.session.generation import GenerationRequest, Token
from meshllm.request import Resumable, Sampling
from meshllm.testing.clock import run_virtual
from tests.bench.chaos import ids_of, random_model
from tests.bench.report import Report, parser_of
from tests.builders.offers import A, B, C
from tests.builders.ring_world import Place, World, at_work, plan_of, until

LAYERS = Span(4, 8)
PROMPT_ROWS = 1024  # of a chunk
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("matrices", Bf16Matrix, "gemv"),
    ("matrices", Bf16Matrix, "gemm"),
    ("attention", attention, "attend"),
    ("attention", flash_attention, "attend"),
    ("norms", rms_norm, "norm"),
)
REST = "rest"
SHOWN = ("matrices", "attention", "norms", REST)
BEFORE, AFTER = plan_of((A, "0:4"), (B, "4:8"), (C, "8:12")), plan_of((A, "0:6"), (C, "6:12"))
TOKENS = 64  # of an answer; it ends earlier
LINK_MBIT = 1000

Run = Callable[[Tensor, SpanCache], Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to compute the rows of a model."""

    model: str
    name: str
    rows: int
    """In a pass."""
    us: float
    """Of a row in a layer."""
    parts: dict[str, float]
    """Microseconds of each of `SHOWN`, without those of timing it."""
    least_us: float
    """Of its matrices."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds of the CPU in a ring of three."""

    model: str
    prompt: int
    prefill_s: float
    recovery_s: float
    loading_s: float
    """The part of `recovery_s` before the new ring serves."""
    rows: int
    """That were computed again, times layers."""

    @property
    def ratio(self) -> float:
        """Return the cost of recovery relative to that of the whole prompt."""
        return self.recovery_s / self.prefill_s


@dataclass(frozen=True, slots=True)
class Leave:
    """What a leave in order costs a ring of three, in seconds of the CPU."""

    model: str
    prompt: int
    prepare_s: float
    """While the ring goes on."""
    sent_bytes: int
    pause_s: float
    """From the end of the old ring to the next token."""
    rows: int
    """That were computed again, times layers."""

    @property
    def link_s(self) -> float:
        """Return how long a link takes for the bytes."""
        return self.sent_bytes * 8 / (LINK_MBIT * 1e6)


@contextmanager
def timed_parts(spent: Counter[str]) -> Iterator[None]:
    """Add up the nanoseconds of each part inside the block."""

    def timed(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            begin = time.process_time_ns()
            result = run(*args)
            spent[part] += time.process_time_ns() - begin
            return result

        return called

    with ExitStack() as stack:
        for part, owner, name in PARTS:
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield


def measure(folder: Path, name: str, count: int) -> Iterator[Kind]:
    """Time ``count`` rows of some layers of a model, each way."""
    source = open_folder(name, folder)
    runner = Runner(load_shard(source, LAYERS, embed=False, head=False), (MAX_ROWS,))
    for _ in runner.warm_up_steps():
        pass
    steps = runner.steps
    inner = steps.inner if isinstance(steps, ReplayedSteps) else steps
    if not isinstance(inner, InvariantSteps):
        raise SystemExit(f"no row-invariant steps here: {runner.execution.reason}")
    linears = [each for each in runner.shard.model.modules() if isinstance(each, CompiledLinear)]
    least = least_us(linears)
    width = runner.shard.model.config.hidden_size
    rows = torch.randn(1, count, width, generator=torch.Generator().manual_seed(0))
    rows = rows.to(torch.bfloat16)
    kinds: list[tuple[str, int, Run, Run]] = [
        ("steps", MAX_ROWS, runner.step, partial(eager, inner)),
        ("steps again", inner.most_recomputed, runner.recompute, runner.recompute),
        ("prompt", PROMPT_ROWS, runner.prefill, runner.prefill),
    ]
    for kind, each, run, traced in kinds:
        whole = min(spend(runner, rows, each, run) for _ in range(2))
        spent = Counter[str]()
        with timed_parts(spent):
            total = spend(runner, rows, each, traced)
        spent[REST] = max(0, total - sum(spent.values()))
        per = 1e3 * count * len(LAYERS)
        share = whole / total / per
        yield Kind(name, kind, each, whole / per, {k: spent[k] * share for k in SHOWN}, least)


def eager(steps: InvariantSteps, x: Tensor, cache: SpanCache) -> Tensor:
    """Run rows of a step without its compiled form, so that its parts can be timed."""
    return steps.run(x, [cache], [x.shape[1]])


@torch.inference_mode()
def spend(runner: Runner, rows: Tensor, each: int, run: Run) -> int:
    """Return the nanoseconds of the CPU for all rows, behind nothing."""
    cache = runner.new_cache()
    begin = time.process_time_ns()
    for part in torch.split(rows, each, 1):
        run(part, cache)
    return time.process_time_ns() - begin


@torch.inference_mode()
def least_us(linears: list[CompiledLinear]) -> float:
    """Return the microseconds of a row in the matrices of a layer, at the rate of the fastest."""
    rates = []
    for linear in linears:
        x = torch.randn(RECOMPUTED_ROWS, linear.in_features).to(torch.bfloat16)
        linear(x)
        spent = []
        for _ in range(20):
            begin = time.process_time_ns()
            linear(x)
            spent.append(time.process_time_ns() - begin)
        rates.append(len(x) * linear.weight.numel() / min(spent))
    values = sum(linear.weight.numel() for linear in linears) / len(LAYERS)
    return values / max(rates, default=1.0) / 1e3


@dataclass(slots=True)
class Asked:
    """One answer, over a loss."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    resume: Resumable | None = None

    async def ask(
        self, place: Place, until_tokens: int, then: Callable[[], None], most: int = TOKENS
    ) -> None:
        """Ask an entry for the rest; call ``then`` when so many tokens have come."""
        entry = place.runtime.entry
        assert entry is not None
        prompt, given = tuple(ids_of(self.prompt, self.prompt)), tuple(self.tokens)
        order = GenerationRequest(
            prompt, Sampling(seed=1), most, lambda _: False, given=given, resume=self.resume
        )
        async for output in entry.generate(order):
            match output:
                case Resumable():
                    self.resume = output
                case Token(token):
                    self.tokens.append(token)
                    if len(self.tokens) == until_tokens:
                        then()
                case _:
                    pass


async def recover(folder: Path, name: str, prompt: int, cache: Path) -> Recovery:
    """Lose the middle of a ring of three while it answers."""
    world, asked = World(folder), Asked(prompt)
    world.config = replace(world.config, cache=cache)
    took = list[float]()

    def note() -> None:
        took.append(time.process_time())

    async with world.serving(A, B, C) as (first, middle, last):
        world.follow(BEFORE)
        await until(lambda: at_work(first, middle, last))
        await Asked(prompt - 1).ask(first, 0, note)  # compiles what the next one needs

        def lose() -> None:
            note()
            for place in (first, last):
                place.runtime.follow(AFTER)

        begin = time.process_time()
        with suppress(LinkLost):
            await asked.ask(first, 1, lose)
        await until(lambda: at_work(first, last))
        loaded = time.process_time()
        most = len(asked.tokens) + 1  # or the entry begins with the one behind it first
        await asked.ask(first, most, note, most)
        lost, resumed = took
        rows = first.runtime.recomputed + last.runtime.recomputed
        return Recovery(name, prompt, lost - begin, resumed - lost, loaded - lost, rows)


async def leave(folder: Path, name: str, prompt: int, cache: Path) -> Leave:
    """Let the middle of a ring of three leave in order while it answers."""
    world, asked = World(folder), Asked(prompt)
    world.config = replace(world.config, cache=cache)
    took, left = list[float](), list[asyncio.Task[None]]()

    async with world.serving(A, B, C) as places:
        first, middle, last = places
        world.follow(BEFORE)
        await until(lambda: at_work(*places))
        await Asked(prompt - 1).ask(first, 0, lambda: None)

        async def prepare() -> None:
            took.append(time.process_time())
            for place in places:
                place.runtime.prepare(AFTER, is_urgent=True)
            while any(each.runtime.prepared != AFTER for each in places):  # noqa: ASYNC110
                await asyncio.sleep(0.001)  # of virtual time, as their records arrive
            took.append(time.process_time())
            world.follow(AFTER)

        with suppress(LinkLost):
            await asked.ask(first, 1, lambda: left.append(asyncio.ensure_future(prepare())))
        await left[0]
        await until(lambda: at_work(first, last))
        await asked.ask(first, len(asked.tokens) + 1, lambda: took.append(time.process_time()))
        begin, prepared, resumed = took
        sent = sum(link.statistics.bytes_sent for link in middle.dialled[1:])
        rows = first.runtime.recomputed + last.runtime.recomputed
        return Leave(name, prompt, prepared - begin, sent, resumed - prepared, rows)


def tables(options: Namespace, report: Report) -> list[Kind | Recovery | Leave]:
    """Print the tables; return their rows."""
    found = list[Kind | Recovery | Leave]()
    with (
        TemporaryDirectory(prefix="meshllm-bench-") as folder,
        ring_table.random_model("qwen3-0.6b", torch.bfloat16, AFTER.stages[-1].span.stop) as qwen,
    ):
        models = ("12 layers of 512", random_model(Path(folder) / "model")), ("qwen3-0.6b", qwen)
        recoveries, leaves = [], []
        for name, path in models:
            given = path, name, options.prompt, Path(folder) / "cache"
            lost = []
            for _ in range(options.times):
                lost.append(run_virtual(recover(*given)))
                gc.collect()
            recoveries.append(sorted(lost, key=lambda each: each.ratio)[len(lost) // 2])
            leaves.append(run_virtual(leave(*given)))
            gc.collect()
        report.say(
            "| model | rows | at a time | us a row and layer |"
            f" {' | '.join(SHOWN)} | matrices at least |",
            "|---|---|---|---|---|---|---|---|---|",
        )
        for name, path in models:
            for kind in measure(path, name, options.rows):
                found.append(kind)
                shown = kind.us, *(kind.parts[each] for each in SHOWN), kind.least_us
                cells = " | ".join(f"{each:.1f}" for each in shown)
                report.say(f"| {kind.model} | {kind.name} | {kind.rows} | {cells} |")
    report.say(
        "",
        "| model | prompt | first token, s | recovery, s | of it loading, s | ratio | rows again |",
        "|---|---|---|---|---|---|---|",
    )
    for each in recoveries:
        times = each.prefill_s, each.recovery_s, each.loading_s
        report.say(
            f"| {each.model} | {each.prompt} | {' | '.join(f'{one:.2f}' for one in times)} |"
            f" {each.ratio:.3f} | {each.rows} |"
        )
    report.say(
        "",
        f"| model | prompt | preparing, s | caches, MB | of a link of {LINK_MBIT} Mbit/s, s |"
        " next token, s | rows again |",
        "|---|---|---|---|---|---|---|",
    )
    for one in leaves:
        report.say(
            f"| {one.model} | {one.prompt} | {one.prepare_s:.2f} | {one.sent_bytes / 1e6:.1f} |"
            f" {one.link_s:.2f} | {one.pause_s:.2f} | {one.rows} |"
        )
    return [*found, *recoveries, *leaves]


def main() -> None:
    """Print the tables."""
    parser = parser_of("recompute", __doc__)
    parser.add_argument("--rows", type=int, default=1500, metavar="N", help="of a session")
    parser.add_argument("--prompt", type=int, default=2000, metavar="TOKENS")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="of each loss")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(options, threads=1)
    report.write(tables(options, report))


if __name__ == "__main__":
    main()
