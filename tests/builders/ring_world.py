"""Runtimes of rings on one slow network."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from meshllm.errors import MeshError
from meshllm.model.files.source import resolve
from meshllm.names import FIRST_GROUP, GroupId, NodeId, Span
from meshllm.node.compute.worker import Worker
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.runtime import RingRuntime, arrive
from meshllm.node.session.generation import GenerationRequest, Token
from meshllm.protocol.planning.chunking import RingTimes
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.request import Sampling
from meshllm.testing.clock import InlineExecutor
from meshllm.transport.contract import Channel, Link
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.offers import A, B, C, D

NAMES = {A: "loopback:a", B: "loopback:b", C: "loopback:c", D: "loopback:d"}


def plan_of(*places: tuple[NodeId, str], epoch: int = 1) -> Plan:
    stages = tuple(PlanStage(node, Span.parse(span)) for node, span in places)
    return Plan(epoch, "tiny", Ends.ENTRY, stages)


ALONE, BOTH = plan_of((A, "0:6")), plan_of((A, "0:2"), (B, "2:6"))


class Place:
    """A runtime and its host."""

    def __init__(self, world: "World", me: NodeId, model: ModelRuntime) -> None:
        self.world, self.me = world, me
        self.told: list[tuple[bool, str]] = []
        self.blamed: list[NodeId] = []
        self.broken: list[Plan] = []
        self.dialled: list[Link] = []
        world.places[me] = self
        self.known: RingTimes | None = None
        self.room = 1 << 30
        self.runtime = RingRuntime(me, model, self)

    def loaded(self, is_loaded: bool, trouble: MeshError | None) -> None:
        self.told.append((is_loaded, str(trouble or "")))
        self.world.changed()

    def at_work(self) -> None:
        """Ignore it."""

    def broke(self, plan: Plan) -> None:
        self.broken.append(plan)

    def look(self) -> None:
        if plan := self.runtime.plan:
            is_formed = all(self.world.has_loaded(stage.node) for stage in plan.stages)
            self.runtime.formed(is_formed=is_formed)

    def times(self, plan: Plan) -> RingTimes | None:
        return self.known if plan.rank(self.me) == 0 else None

    def rooms(self, plan: Plan) -> list[int] | None:
        return [self.room] * len(plan.stages)

    def faulty(self, node: NodeId) -> None:
        self.blamed.append(node)

    async def dial(self, node: NodeId) -> Link:
        link = await self.world.transport.dial(NAMES[node])
        self.dialled.append(link)
        await link.send([self.me], Channel.CONTROL)  # stands for the handshake
        return link

    async def listen(self) -> None:
        async with self.world.transport.listen(NAMES[self.me]) as listener:
            async for link in listener.links():
                _, peer = await link.receive()
                self.world.links.append(link)
                await arrive(link, NodeId(bytes(peer)), self.find)

    def find(self, group: GroupId) -> RingRuntime | None:
        return self.runtime if group == FIRST_GROUP else None


class World:
    """Hosts on one slow network."""

    def __init__(
        self, llama: Path, prefix_bytes: int | None = None, chunk: int | None = None
    ) -> None:
        self.llama = llama
        self.config = InferenceConfig(prefix_bytes=prefix_bytes, chunk=chunk)
        self.transport = LoopbackTransport(TrafficShape(delay_s=0.01))
        self.places: dict[NodeId, Place] = {}
        self.links: list[Link] = []
        self.hidden: set[NodeId] = set()

    def changed(self) -> None:
        for place in self.places.values():
            place.look()

    def has_loaded(self, node: NodeId) -> bool:
        place = self.places.get(node)
        return place is None or node in self.hidden or bool(place.told and place.told[-1][0])

    @asynccontextmanager
    async def serving(self, *nodes: NodeId) -> AsyncIterator[list[Place]]:
        for node in nodes:
            source, worker = resolve(str(self.llama)), Worker(InlineExecutor())
            model = await ModelRuntime.open(source, worker, self.config)
            Place(self, node, model)
        places = list(self.places.values())
        jobs = [job for place in places for job in (place.runtime.run(), place.listen())]
        running = [asyncio.ensure_future(job) for job in jobs]
        try:
            yield places
            assert not [task for task in running if task.done()]
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def follow(self, plan: Plan | None) -> None:
        for place in self.places.values():
            place.runtime.follow(plan)


async def tokens(place: Place) -> list[int]:
    entry = place.runtime.entry
    assert entry is not None
    order = GenerationRequest((3, 1, 4, 1, 5), Sampling(), 6, lambda _: False)
    return [out.id async for out in entry.generate(order) if isinstance(out, Token)]


async def until(claim: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not claim():  # noqa: ASYNC110  # no time passes
            await asyncio.sleep(0.1)


def at_work(*places: Place) -> bool:
    return all(place.runtime.entry or place.runtime.stage for place in places)
