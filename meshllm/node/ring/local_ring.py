"""A whole ring in one process: one `RingRuntime` per rank, over loopback, with a fixed plan.

Messages are encoded, hashed and checked at every hop, as between machines.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

from blake3 import blake3

from meshllm.errors import LinkLost, MeshError, UserError
from meshllm.model.device import CPU, free_bytes
from meshllm.model.files.loader import list_weights
from meshllm.model.files.source import Source, resolve
from meshllm.model.shape import free_memory
from meshllm.model.text.tokenizer import Text
from meshllm.names import NodeId
from meshllm.node.compute.worker import Worker, compute_thread
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.runtime import RingRuntime, arrive
from meshllm.node.ring.shape import plan_shape, waiting_room
from meshllm.node.session.entry import EntryNode
from meshllm.node.session.generation import GenerationRequest, Token
from meshllm.node.session.stage import StageNode
from meshllm.node.session.text import RingBackend
from meshllm.protocol.planning.chunking import RingTimes
from meshllm.protocol.planning.plan import Ends, Links, Offer, Plan, PlanConstraints
from meshllm.protocol.planning.policies import make_plan
from meshllm.protocol.planning.problem import kv_capacities
from meshllm.request import Event, Request, Sampling
from meshllm.transport.contract import Link, Listener, Transport
from meshllm.transport.registry import Registry

EPOCH = 1  # the plan of a ring in one process never changes


@dataclass(frozen=True, slots=True)
class RingOptions:
    """Options of a ring in one process."""

    nodes: int = 1
    """Ranks that hold layers."""
    transport: str = "loopback"
    """Name of the transport plugin between them."""
    ends: Ends = Ends.ENTRY
    """Where embedding and head are: on the first node, or on a client without layers."""
    own_threads: bool = False
    """Give each rank its own compute thread, as if it were alone on its cores."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)


class _Rank:
    """The host of one runtime: dials the next rank and accepts links of the previous one."""

    def __init__(
        self, ring: "LocalRing", number: int, model: ModelRuntime, listener: Listener | None
    ) -> None:
        self._listener = listener
        self.runtime = RingRuntime(ring.plan.stages[number].node, model, self)
        self.trouble: MeshError | None = None
        self.is_loaded = False
        self._ring = ring
        self._before = ring.plan.stages[number - 1].node

    def loaded(self, is_loaded: bool, trouble: MeshError | None) -> None:
        """Record whether this rank has loaded; once all have, all dial."""
        self.is_loaded, self.trouble = is_loaded, trouble
        self._ring.changed()

    def at_work(self) -> None:
        """Let the ring check whether all ranks serve."""
        self._ring.changed()

    def broke(self, plan: Plan) -> None:
        """Ignore it: the ranks of one process end together."""

    def times(self, plan: Plan) -> RingTimes | None:
        """Return None: ranks of one process share its cores."""
        return None

    def rooms(self, plan: Plan) -> list[int] | None:
        """Return the bytes that each rank has for caches."""
        return self._ring.rooms

    def faulty(self, node: NodeId) -> None:
        """Ignore it: the ranks of one process cannot be left out."""

    async def dial(self, node: NodeId) -> Link:
        """Open a link to another rank."""
        return await self._ring.dial(node)

    async def run(self) -> None:
        """Serve, and accept links, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.runtime.run())
            if self._listener is not None:
                async for link in self._listener.links():
                    await arrive(link, self._before, lambda _: self.runtime)


class LocalRing:
    """A ring in this process."""

    def __init__(
        self,
        plan: Plan,
        models: Sequence[ModelRuntime],
        listeners: Sequence[Listener],
        transport: Transport | None,
        rooms: Sequence[int],
    ) -> None:
        self.plan = plan
        self.rooms = list(rooms)
        """Bytes that each rank has for caches."""
        self.model = models[0]
        self._transport = transport
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._addresses = {
            stage.node: listener.address
            for stage, listener in zip(plan.stages, listeners, strict=False)
        }
        self._ranks = [
            _Rank(self, number, model, listeners[number] if listeners else None)
            for number, model in enumerate(models)
        ]

    @property
    def worker(self) -> Worker:
        """The compute thread of the entry."""
        return self.model.worker

    @property
    def entry(self) -> EntryNode:
        """The entry; raise `LinkLost` while the ring is forming again."""
        entry = self._ranks[0].runtime.entry
        if entry is None:
            raise LinkLost("The ring was lost and is forming again")
        return entry

    @property
    def stages(self) -> list[StageNode]:
        """The stages that serve."""
        stages = (rank.runtime.stage for rank in self._ranks)
        return [stage for stage in stages if stage]

    @cached_property
    def text(self) -> Text:
        """The model's tokenizer and chat template; raise `ModelError` if there is none."""
        return Text.load(self.model.source.folder)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request, see `Backend`."""
        await self.formed()
        text = await self.model.text()
        backend = RingBackend(self.entry, self.worker, text, self.plan)
        async with aclosing(backend.generate(request)) as events:
            async for event in events:
                yield event

    async def tokens(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int
    ) -> AsyncGenerator[int, None]:
        """Yield ``max_tokens`` token ids after a prompt of token ids; end tokens do not end it."""
        order = GenerationRequest(tuple(prompt), sampling, max_tokens, take_token=lambda _: False)
        async with aclosing(self.entry.generate(order)) as outputs:
            async for output in outputs:
                if isinstance(output, Token):
                    yield output.id

    async def warmed_up(self) -> None:
        """Wait until every rank has finished its warm-up."""
        for rank in self._ranks:
            await rank.runtime.warmed_up.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all ranks; an exception in a rank is a bug, and is raised at the end."""
        self._tasks = tasks = [asyncio.create_task(rank.run()) for rank in self._ranks]
        for task in tasks:
            task.add_done_callback(lambda _: self._news.set())
        try:
            await asyncio.sleep(0)  # a runtime accepts work after its first step
            for rank in self._ranks:
                rank.runtime.follow(self.plan)
            await self.formed()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()

    async def dial(self, node: NodeId) -> Link:
        """Open a link to a rank."""
        assert self._transport is not None  # a ring of one dials no rank
        return await self._transport.dial(self._addresses[node])

    def changed(self) -> None:
        """Check the ranks again, after one has changed."""
        if all(rank.is_loaded for rank in self._ranks):
            for rank in self._ranks:
                rank.runtime.formed(is_formed=True)
        self._news.set()

    async def formed(self) -> None:
        """Wait until all ranks serve; raise the error, or the bug, of a rank that cannot."""
        while not all(rank.runtime.entry or rank.runtime.stage for rank in self._ranks):
            for trouble in filter(None, (rank.trouble for rank in self._ranks)):
                raise trouble
            for task in self._tasks:
                if task.done() and not task.cancelled():
                    task.result()
                elif task.done():
                    raise LinkLost("The ring is closed")
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def open_local_ring(
    source: Source, options: RingOptions, transport: Transport | None = None
) -> AsyncIterator[LocalRing]:
    """Form a ring of nodes in this process; on exit nothing is left running.

    Raises:
        UserError: more nodes than layers, or no such device.
        ModelError: the model does not fit, cannot be split, or does not match its draft model.
        PluginError: no such transport.
    """
    async with AsyncExitStack() as stack:
        config = options.inference
        worker = await stack.enter_async_context(compute_thread(config.threads or 1))
        await worker.run(list_weights, source.folder)  # cheap checks first
        draft = await worker.run(resolve, config.draft) if config.draft else None
        is_whole = options.nodes == 1 and options.ends is Ends.ENTRY
        model = await ModelRuntime.open(source, worker, config, draft, is_whole=is_whole)
        offers = local_offers(model, options)
        plan = local_plan(model, options, offers)
        ring = len(plan.stages)
        model.verdict.require(ring)
        if not options.own_threads:
            await model.calibrate()
        workers = [worker]
        for _ in plan.stages[1:]:
            own = compute_thread(config.threads or 1)
            workers.append(await stack.enter_async_context(own) if options.own_threads else worker)
        listeners: list[Listener] = []
        if ring > 1:
            transport = transport or Registry.discover().load(options.transport)
            listeners = [await stack.enter_async_context(transport.listen()) for _ in plan.stages]
        share = config.prefix_bytes and config.prefix_bytes // ring
        models = [
            model.rank(each, divides_head=options.own_threads, prefix_bytes=share)
            for each in workers
        ]
        rooms = kv_capacities(plan, offers, plan_shape(model.shape))
        for stage, each, room in zip(plan.stages, models, rooms, strict=True):
            await each.hold(plan, stage.node, room)  # one by one: transformers builds one at a time
        formed = LocalRing(plan, models, listeners, transport, rooms)
        await stack.enter_async_context(formed.running())
        yield formed


def local_offers(model: ModelRuntime, options: RingOptions) -> list[Offer]:
    """Divide the memory of this machine, or of its GPU, equally among the nodes."""
    ranks = options.nodes + (options.ends is Ends.CLIENT)
    free = free_memory() if model.device == CPU else free_bytes(model.device)
    memory = max(0, free - (model.draft.bytes if model.draft else 0)) // ranks
    ids = [NodeId(blake3(rank.to_bytes(4)).digest()) for rank in range(ranks)]
    reserve = waiting_room(model.shape).total if ranks > 1 else 0
    return [Offer(node, memory, ((1, 1e-3),), 0.0, reserve) for node in ids]


def local_plan(model: ModelRuntime, options: RingOptions, offers: Sequence[Offer]) -> Plan:
    """Divide the layers of a model among the nodes of this process."""
    shape, nodes, ends = model.shape, options.nodes, options.ends
    if nodes > shape.layers:
        raise UserError(
            f"{nodes} nodes for the {shape.layers} layers of `{shape.name}`",
            hint=f"use `--nodes {shape.layers}` or fewer",
        )
    entry = offers[0].node if ends is Ends.CLIENT else None
    return make_plan(
        offers,
        Links(),
        plan_shape(shape),
        policy="proportional",
        epoch=EPOCH,
        terms=PlanConstraints(ends=ends, members=len(offers), entry=entry),
    )
