"""A whole ring inside one process, as real as any: encoded, hashed, checked at every hop.

Each rank has its own layers, caches and machine, and talks to its neighbours over a transport.
Knows nothing about where a request comes from.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from meshllm.model.cache import slack_of
from meshllm.model.capacity import ModelShape, room_for, shape_of
from meshllm.model.check import check
from meshllm.model.device import CPU, choose
from meshllm.model.draft import Drafting, SuffixDrafting
from meshllm.model.draft_model import ModelDrafting, find_draft
from meshllm.model.head import find_parts
from meshllm.model.loader import list_weights
from meshllm.model.runner import Runner
from meshllm.model.shard import Shard
from meshllm.model.source import Source
from meshllm.model.speed import prefix_budget
from meshllm.model.text import Text
from meshllm.names import Quant, Span, WireMode
from meshllm.node.assembly import MAX_SESSIONS, Shards, connect, load, local_plan, running, seat
from meshllm.node.entry import EntryNode, Seat
from meshllm.node.generate import answer
from meshllm.node.outgoing import settle
from meshllm.node.rehearsal import Rehearsal
from meshllm.node.session import Order, Token
from meshllm.node.stage import StageNode
from meshllm.node.worker import Worker, calibrate, compute_thread
from meshllm.protocol.chunking import usual_pace
from meshllm.protocol.codec import MAX_POSITION, MAX_ROWS
from meshllm.protocol.lookahead import MAX_DEPTH, STEPS
from meshllm.protocol.pace import Pace
from meshllm.protocol.plan import Ends, Plan
from meshllm.protocol.stage import MAX_PENDING
from meshllm.request import Event, Request, Sampling
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Transport
from meshllm.transport.registry import Registry


@dataclass(frozen=True, slots=True)
class RingOptions:
    """What to build."""

    nodes: int = 1
    """Ranks that hold layers."""
    transport: str = "loopback"
    """Name of the transport plugin between them."""
    ends: Ends = Ends.ENTRY
    """Who holds embedding and head."""
    dtype: torch.dtype | None = None
    """As stored when None."""
    threads: int | None = None
    """Cores that torch may use; measured when None."""
    own_threads: bool = False
    """Each rank computes on a thread of its own, as if it were alone on its cores."""
    chunk: int | None = None
    """Rows of a prefill chunk; chosen by the length of the prompt when None."""
    drafting: Drafting | None = field(default_factory=SuffixDrafting)
    """Who guesses at tokens, so that several are computed at once; None is nobody."""
    draft: Source | None = None
    """A model that guesses too, held as stored by the entry."""
    depth: int = MAX_DEPTH
    """Steps of guesses in flight at most; 1 is that each waits for the one before it."""
    quant: Quant = Quant.NONE
    cache: Path | None = None
    """Folder in which quantised matrices are kept."""
    exact: bool = False
    """Compute each token as transformers does, to the last bit; nobody guesses then."""
    wire: WireMode = WireMode.EXACT
    """How hidden states travel between the nodes."""
    prefix_bytes: int | None = None
    """For what finished sessions leave; None is a share of what is free."""
    device: str = "cpu"
    """Where layers are computed, as `model.device.choose` reads it."""


class Ring:
    """A ring that is ready to answer."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        worker: Worker,
        entry: EntryNode,
        stages: Sequence[StageNode],
        rehearsal: Rehearsal,
    ) -> None:
        self.source = source
        self.plan = plan
        self.worker = worker
        self.entry = entry
        self.stages = stages
        """The ranks behind the entry."""
        self.rehearsal = rehearsal
        """Under way while nobody asks for anything."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Let all ranks work."""
        ranks = (self.entry.run(), *(stage.run() for stage in self.stages))
        return running(*ranks, self.rehearsal.run())

    @cached_property
    def text(self) -> Text:
        """The model's tokenizer and chat template; raise `ModelError` when there is none."""
        return Text.load(self.source.folder)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield progress, pieces of text, and the `Answer` last; see `generate.answer`."""
        text = await self.worker.run(lambda: self.text)  # reading it takes long, once
        async with aclosing(answer(self.entry, self.worker, text, self.plan, request)) as events:
            async for event in events:
                yield event

    async def tokens(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int
    ) -> AsyncGenerator[int, None]:
        """Yield ``max_tokens`` token ids after a prompt in token ids, past any end token."""
        order = Order(tuple(prompt), sampling, max_tokens, is_last=lambda _: False)
        async with aclosing(self.entry.generate(order)) as outputs:
            async for output in outputs:
                if isinstance(output, Token):
                    yield output.id


@asynccontextmanager
async def open_ring(
    source: Source, options: RingOptions, transport: Transport | None = None
) -> AsyncIterator[Ring]:
    """Form a ring of nodes in this process; leave nothing running.

    Raises:
        UserError: more nodes than layers, or no such device.
        ModelError: the model does not fit, its type cannot be split, or the draft is not for it.
        PluginError: there is no such transport.
    """
    async with AsyncExitStack() as stack:
        threads = options.threads or 1
        worker = await stack.enter_async_context(compute_thread(threads))
        await worker.run(list_weights, source.folder)  # what is cheap to refuse goes first
        verdict = await worker.run(check, source.config)
        shape = await worker.run(shape_of, source, options.dtype, options.quant)
        dtype: torch.dtype = getattr(torch, shape.dtype)
        device = await worker.run(choose, options.device, dtype, options.quant)
        options = replace(options, device=str(device))
        draft = await worker.run(_load_draft, source, options)  # the plan divides what is left
        plan = local_plan(shape, options.nodes, options.ends, device)
        verdict.require(len(plan.stages))
        if options.threads is None and not options.own_threads and device.type == "cpu":
            await worker.run(calibrate, worker.cores, shape.hidden_size, dtype)
        context, ring = shape.context or MAX_POSITION, len(plan.stages)
        most = min(MAX_ROWS, (MAX_MESSAGE_BYTES - 256) // (shape.hidden_size * 4))
        pace = _usually(ring, most)
        if not verdict.chunkable:  # the whole prompt goes in one message, which has a limit
            context, pace = min(context, most), _always(most, ring)
        elif options.chunk is not None or options.exact:
            pace = _always(min(options.chunk or most, most), ring)
        steps = STEPS if verdict.croppable and not options.exact else ()
        shards = await worker.run(_load, source, shape, plan, options, context, steps)
        neighbours = []
        if ring > 1:
            transport = transport or Registry.discover().load(options.transport)
            neighbours = await connect(plan, transport, stack)
        workers = [worker] * ring
        if options.own_threads:
            others = [compute_thread(threads) for _ in workers[1:]]
            workers[1:] = [await stack.enter_async_context(other) for other in others]
        drafting = options.drafting if steps else None
        wire = await worker.run(settle, options.wire, source.config, dtype)
        slack = slack_of(source.config, shape.layers) if verdict.croppable else 0
        rooms = _rooms(shape, plan, options) if verdict.chunkable else [0] * ring
        place = Seat(
            ring,
            plan.epoch,
            pace,
            MAX_SESSIONS,
            slack,
            rooms[0],
            drafting,
            wire,
            draft,
            options.depth,
        )
        formed = Ring(
            source,
            plan,
            worker,
            *seat(shards, plan, workers, neighbours, place, rooms),
            _rehearsal(shards, workers, drafting),
        )
        await stack.enter_async_context(formed.running())
        yield formed


def _rehearsal(shards: Shards, workers: Sequence[Worker], drafting: Drafting | None) -> Rehearsal:
    """Let each rank rehearse on its worker, where anybody guesses: one row needs none."""
    held = [shards.ends.runners, *([runner] for runner in shards.behind)] if drafting else []
    pairs = zip(workers, held, strict=False)
    return Rehearsal([(worker, runner) for worker, runners in pairs for runner in runners])


def _rooms(shape: ModelShape, plan: Plan, options: RingOptions) -> list[int]:
    """Count the tokens of finished sessions that each rank may keep."""
    budget = (
        0 if options.exact else prefix_budget(options.prefix_bytes, torch.device(options.device))
    )
    return [room_for(shape, stage.span, budget // len(plan.stages)) for stage in plan.stages]


def _usually(ring: int, most: int) -> Callable[[int, int], Pace]:
    return lambda prompt, _: usual_pace(prompt, ring, most)


def _always(chunk: int, ring: int) -> Callable[[int, int], Pace]:
    return lambda *_: Pace(chunk=chunk, window=min(ring, MAX_PENDING))


def _load_draft(source: Source, options: RingOptions) -> ModelDrafting | None:
    """Load what guesses for a model; runs on the compute thread."""
    if options.draft is None:
        return None
    return find_draft(options.draft, source).load(torch.device(options.device))


def _load(
    source: Source,
    shape: ModelShape,
    plan: Plan,
    options: RingOptions,
    context: int,
    steps: Sequence[int],
) -> Shards:
    """Load what every rank holds; runs on the compute thread."""

    def run(span: Span, **parts: Any) -> Runner:
        shard = Shard.load(
            source,
            span,
            dtype=options.dtype,
            quant=options.quant,
            cache=options.cache,
            device=torch.device(options.device),
            **parts,
        )
        return Runner(shard, steps)

    is_apart = options.own_threads and torch.device(options.device) == CPU
    is_apart = is_apart and options.ends is Ends.ENTRY  # a client shows nobody a token
    parts = find_parts(source, shape) if is_apart and steps and len(plan.stages) > 1 else None
    return load(plan, run, context, parts)
