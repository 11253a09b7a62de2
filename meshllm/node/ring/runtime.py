"""Serves one plan after the other on a node: drives `Forming`, runs the entry or a stage.

Theory of operation
-------------------
While a ring serves, the bytes that its ranks have for caches may change, as another model of a node
begins or ends. Each rank computes them from the records, and uses them without a pause; only if
what runs there does not fit, the ring forms again. The entry may never admit what another rank
refuses, and nodes learn of records at different times. So the entry is the first to use less, and
the last to use more: a rank that must not be the first waits for `RECORD_PROPAGATION_S`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, assert_never

from meshllm.errors import LinkLost, MeshError
from meshllm.names import FIRST_GROUP, GroupId, NodeId
from meshllm.node.compute.warm_up import WarmUp
from meshllm.node.ring.held_layers import HeldLayers
from meshllm.node.ring.idle_links import IdleLink, IdleLinks
from meshllm.node.ring.kv_handover import HandoverHost, KvHandover
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.shape import waiting_room
from meshllm.node.session.entry import EntryConfig, EntryNode
from meshllm.node.session.ring_link import Neighbours, RingLink
from meshllm.node.session.stage import StageNode
from meshllm.node.timer import DeadlineTimer, loop_time
from meshllm.protocol.kv_cache.admission import MAX_OPEN_SESSIONS, MAX_SESSIONS
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.forming import (
    Action,
    AttemptEnded,
    Begin,
    CloseLink,
    Forming,
    Load,
    OpenLink,
    Release,
    ReportLoad,
    Stop,
)
from meshllm.protocol.ring.slowdown import Slowdown
from meshllm.protocol.session.codec import decode, encode
from meshllm.protocol.session.link import SILENCE, NeighbourLink
from meshllm.protocol.session.messages import Hello, KvOffer
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import Stage
from meshllm.transport import contract

RECORD_PROPAGATION_S = 10.0  # s until all ranks have planned with a record; that takes about one

logger = logging.getLogger(__name__)

Job = Callable[[], Coroutine[Any, Any, None]]


class RuntimeHost(HandoverHost, Protocol):
    """What a runtime needs from its node.

    The host calls `RingRuntime.formed` after each change to the set of nodes that have loaded the
    plan.
    """

    def loaded(self, is_loaded: bool, trouble: MeshError | None) -> None:
        """Called with whether the span of the plan is loaded, and the error if it cannot be."""

    def at_work(self) -> None:
        """Called when this node has begun or ceased to serve in a ring."""

    def broke(self, plan: Plan) -> None:
        """Called when the ring of a plan has ended."""


class RingRuntime:
    """The rank of a node in the ring of the plan in force."""

    def __init__(
        self, me: NodeId, model: ModelRuntime, host: RuntimeHost, group: GroupId = FIRST_GROUP
    ) -> None:
        self._me = me
        self._group = group
        self._model = model
        self._host = host
        self._machine = Forming(me)
        self._formed: Plan | None = None  # the latest plan that all its nodes had loaded
        self._before: Plan | None = None  # `_formed` when the plan in force was adopted
        self._opened: Plan | None = None  # the plan of the ring in which this node served last
        self._replaced: Plan | None = None  # the plan of the ring that was lost before that
        self._slowdown = Slowdown()
        self._job: Job | None = None  # the next one
        self._is_replaced = asyncio.Event()
        self._totals: list[int] = []  # bytes that the ranks have for caches now
        self._has_new_totals = asyncio.Event()
        self._timer = DeadlineTimer(lambda: self._machine.deadline, self._expire)
        self._tasks = asyncio.TaskGroup()
        self._links = IdleLinks(self._tasks, self._gone)
        self._held = HeldLayers(
            *(me, model, self._tasks, lambda: self.sessions, host.at_work, lambda: self.stage),
            lambda plan: self._handover.hand_over(plan, self._entry or self.stage),
        )
        self._handover = KvHandover(
            *(me, group, model, host, self._held, self._tasks),
            lambda: self.plan,
            self._links.discard,
        )
        self.warmed_up = asyncio.Event()
        """Set when the warm-up has ended."""
        self._is_closed = False
        self._entry: EntryNode | None = None
        self.stage: StageNode | None = None
        """Set while this node is another rank of an open ring."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._machine.plan

    @property
    def history(self) -> list[tuple[str, float]]:
        """The latest states of this rank, oldest first, and how many seconds ago they began."""
        now = loop_time()
        return [(state.name.lower(), now - since) for state, since in self._machine.history]

    @property
    def sessions(self) -> int:
        """Number of sessions in progress on this rank."""
        return sum(node.sessions for node in (self._entry, self.stage) if node)

    @property
    def recomputed(self) -> int:
        """Rows computed again after losses, times the layers that computed them.

        The entry counts what a session without caches computes again, for all ranks.
        """
        return self._held.recomputed

    @property
    def received_bytes(self) -> int:
        """Memory of KV caches that are handed over for layers loaded in advance."""
        return self._held.received_bytes

    @property
    def prepared(self) -> Plan | None:
        """The plan that may follow for which this node has loaded what it can."""
        return self._held.prepared

    @property
    def preloaded(self) -> Plan | None:
        """The plan that may follow whose span this node has loaded."""
        return self._held.preloaded

    def take_layer_s(self) -> float | None:
        """See `Slowdown.take_layer_s`."""
        return self._slowdown.take_layer_s()

    def take_replaced(self) -> Plan | None:
        """Return the plan of the ring before the one that has opened, once; it may be the same."""
        replaced, self._replaced = self._replaced, None
        return replaced

    @property
    def entry(self) -> EntryNode | None:
        """The entry while this node is rank 0 of an open ring."""
        return self._entry if self._entry and not self._entry.is_lost else None

    @property
    def missing(self) -> NodeId | None:
        """The neighbour that keeps the ring from opening; None if none does, or not for long."""
        return self._machine.missing(loop_time())

    def follow(self, plan: Plan | None) -> None:
        """Serve this plan from now on."""
        if plan != self.plan:
            self._entry = self.stage = None  # they belong to the last plan, and are about to end
            self._before = self._formed
            if plan and plan.rank(self._me) is None:
                self._opened = None  # the plans that follow may lose other nodes than it did
            if plan and plan.rank(self._me) is not None:
                self._held.keep_preloaded()
            else:  # the last plan may have been replaced before it used that
                self._held.release_late()
            self._act(self._machine.follow(plan, loop_time()))

    def prepare(self, plan: Plan | None, *, is_urgent: bool = False) -> None:
        """Load the span of a plan that may follow, beside what this node serves.

        Unless it ``is_urgent``, that waits until the compute thread is idle.
        """
        if not self._is_closed:
            self._held.prepare(plan, is_urgent=is_urgent)

    def reload(self) -> None:
        """Try again to load a span that could not be loaded."""
        self._act(self._machine.reload(loop_time()))

    def formed(self, *, is_formed: bool) -> None:
        """Update whether all nodes of the plan in force have loaded."""
        if is_formed:
            self._formed = self.plan
        self._act(self._machine.formed(loop_time(), is_formed=is_formed))

    def resize(self) -> None:
        """Use what the ranks have for caches now, if that differs from before."""
        budget = self._budget(self.plan) if self.plan else None
        totals = _totals(budget) if budget else self._totals
        if totals != self._totals:
            self._totals = totals
            self._has_new_totals.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with self._tasks, self._timer:
                try:
                    while True:
                        await self._until_replaced()
                finally:
                    self._is_closed = True  # from now on nothing may be started
        finally:
            self._machine.close()
            await self._links.close_all()

    @property
    def is_closed(self) -> bool:
        """Whether it accepts no links any more."""
        return self._is_closed

    def take(self, link: IdleLink, peer: NodeId, hello: Hello) -> None:
        """Take over a link after its first message."""
        self._act(self._machine.arrived(peer, hello, self._links.add(link), loop_time()))

    def take_caches(self, link: IdleLink, peer: NodeId, offer: KvOffer) -> None:
        """Take over a link by which a node of the ring hands over its KV caches."""
        self._handover.take(link, peer, offer)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Stop() | Load() | OpenLink() | Begin():
                    self._job = self._job_of(action)
                    self._is_replaced.set()
                case Release():
                    self._held.release()
                case CloseLink(number):
                    self._links.close(number)
                case ReportLoad(is_loaded, trouble):
                    self._host.loaded(is_loaded, trouble)
                case AttemptEnded(reason):
                    logger.info("ring not formed: %s", reason)
                case _:
                    assert_never(action)
        self._timer.reset()

    def _expire(self) -> None:
        self._act(self._machine.expire(loop_time()))

    def _gone(self, number: int) -> None:
        self._act(self._machine.gone(number, loop_time()))

    # Jobs, one at a time.

    def _job_of(self, action: Stop | Load | OpenLink | Begin) -> Job | None:
        match action:
            case Load(plan):
                return partial(self._load, plan)
            case OpenLink(node):
                return partial(self._dial, node)
            case Begin(plan, before, after):
                self._links.stop_watching(before, after)
                return partial(self._serve, plan, before, after)
            case Stop():
                return self._model.unload_late if self._is_free else None

    async def _until_replaced(self) -> None:
        """Run the current job until another one replaces it; wait for its end."""
        self._is_replaced.clear()
        replaced = asyncio.create_task(self._is_replaced.wait())
        job = asyncio.create_task(self._job()) if self._job else replaced
        try:
            await asyncio.wait({job, replaced}, return_when=asyncio.FIRST_COMPLETED)
            if job.done():
                job.result()  # a bug
                await replaced
        finally:
            for task in (job, replaced):
                task.cancel()
            await asyncio.wait({job, replaced})
            if not job.cancelled():
                job.result()

    async def _load(self, plan: Plan) -> None:
        try:
            await self._held.load(plan, self._budget(plan))
        except MeshError as error:
            logger.warning("cannot load layers of %s: %s", plan.stages, error)
            self._act(self._machine.unloadable(error, loop_time()))
        else:
            self._act(self._machine.loaded(loop_time()))
        self._held.release_late()

    async def _dial(self, node: NodeId) -> None:
        try:
            link = IdleLink(await self._host.dial(node))
        except MeshError as error:
            self._act(self._machine.failed(str(error), loop_time()))
            return
        number = self._links.add(link)
        try:
            await link.send(encode(self._hello), contract.Channel.CONTROL)
        except MeshError as error:
            self._links.close(number)
            self._act(self._machine.failed(str(error), loop_time()))
        except asyncio.CancelledError:
            self._links.close(number)
            raise
        else:
            self._act(self._machine.dialled(number, loop_time()))

    async def _serve(self, plan: Plan, *numbers: int | None) -> None:
        """Serve until a neighbour is lost."""
        links = self._links.take(*numbers)
        try:
            for link in links:
                await link.watch_ended()
            if self.plan != plan or len(links) < len(numbers) - numbers.count(None):
                return  # another one has closed links or layers
            peers = self._peers(plan, links)
            node = self._rank(plan, Neighbours(*peers) if peers else None)
            reason = await self._run(plan, node) if node else LinkLost("A node withdrew its offer")
        finally:  # in the background: closing waits for the peer, which the next plan need not
            for link in links:
                self._links.discard(link)
        self._host.broke(plan)
        self._act(self._machine.broke(str(reason), loop_time()))

    async def _run(self, plan: Plan, node: EntryNode | StageNode) -> MeshError:
        model, span = self._model, self._held.span
        runners = span.runners if span and model.drafting else []
        warm_up = WarmUp([(model.worker, runner) for runner in runners], self.warmed_up)
        self._totals = _totals(node.budget)
        self._has_new_totals.clear()
        running = asyncio.ensure_future(node.run())
        outgrown = asyncio.ensure_future(self._outgrown(plan, node))
        warming_up = asyncio.ensure_future(warm_up.run())
        try:
            await asyncio.sleep(0)  # it accepts work after its first step
            self._replaced, self._opened = self._opened or self._before, self.plan
            self._at_work(node)
            await asyncio.wait({running, outgrown}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            outgrown.result()  # a bug
            return LinkLost("There is less memory now")
        finally:
            self._at_work(None)
            for task in (running, outgrown, warming_up):
                task.cancel()
            await asyncio.gather(running, outgrown, warming_up, return_exceptions=True)

    async def _outgrown(self, plan: Plan, node: EntryNode | StageNode) -> None:
        """Let a rank use what there is for caches; return once what runs does not fit."""
        is_fit = True
        while is_fit:
            await self._has_new_totals.wait()
            self._has_new_totals.clear()
            is_replaced = self.plan != plan  # the totals are those of another plan, about to begin
            is_fit = is_replaced or await self._use_totals(plan, node)

    async def _use_totals(self, plan: Plan, node: EntryNode | StageNode) -> bool:
        """Let a rank use what there is for caches, see above; return whether what runs fits."""
        before, after = _totals(node.budget), self._totals
        if len(plan.stages) > 1:
            bound: Callable[[int, int], int] = min if isinstance(node, EntryNode) else max
            at_once = [*map(bound, before, after)]
            if not node.resize(at_once):
                return False
            if isinstance(node, StageNode):  # nobody needs finished sessions
                node.make_room(before[0] - after[0])
            if at_once != after and await self._changes_soon():
                return True
        return node.resize(after)

    async def _changes_soon(self) -> bool:
        """Wait until all ranks know of a change; return whether there is another one before."""
        try:
            async with asyncio.timeout(RECORD_PROPAGATION_S):
                await self._has_new_totals.wait()
        except TimeoutError:
            return False
        return True

    @property
    def _is_free(self) -> bool:
        return self.plan is None or self.plan.rank(self._me) is None

    # Parts of a rank.

    @property
    def _hello(self) -> Hello:
        assert self.plan is not None  # a node without one dials no rank
        return Hello(self._me, self.plan.epoch, self.plan.digest, self._group)

    def _peers(self, plan: Plan, links: Sequence[IdleLink]) -> list[RingLink]:
        """Return the links to the previous and the next rank; none in a ring of one."""
        rank, stages = plan.rank(self._me) or 0, plan.stages
        nodes = [stages[rank - 1].node, stages[(rank + 1) % len(stages)].node][: len(links)]
        machines = [NeighbourLink(self._hello, peer=node) for node in nodes]
        for machine in machines[1:]:
            machine.open(loop_time())  # the next rank got a Hello when it was dialled
        return [
            RingLink(
                *(link, machine, partial(self._host.faulty, node), link.features),
                ended=partial(self._links.discard, link),  # the ranks end after their running job
            )
            for link, machine, node in zip(links, machines, nodes, strict=True)
        ]

    def _rank(self, plan: Plan, neighbours: Neighbours | None) -> EntryNode | StageNode | None:
        """Build the entry or a stage; None if a node of the plan has withdrawn its offer."""
        if (budget := self._budget(plan)) is None:
            return None
        rank, ring = plan.rank(self._me) or 0, len(plan.stages)
        model, span = self._model, self._held.span
        assert span is not None  # it was loaded before any link was dialled
        store = self._held.caches(plan, budget, self._before)
        room = waiting_room(model.shape)
        times = self._host.times(plan)
        if times:
            self._held.limits.plan(times.ranks[rank], 0.0 if rank else times.head_s)
        has_head = span.entry is not None and span.entry.head is None
        self._slowdown.plan(
            times.ranks[rank] if times else None, times.head_s if times and has_head else 0.0
        )
        span.layers.on_step = self._slowdown.note
        if span.entry is not None:
            if neighbours is not None:
                neighbours.share(room.total)
            config = EntryConfig(
                ring,
                plan.epoch,
                partial(self._pace, plan),
                times.best_sessions if times else MAX_SESSIONS,
                model.max_crop,
                store.prefixes,
                model.drafting,
                draft=span.draft,
                wire=model.wire,
                prompt_bytes=room.prompt_bytes if neighbours else None,
                max_chunk=model.max_rows,
                limits=self._held.limits,
                is_handed_over=self._held.is_handed_over,
                on_recomputed=partial(self._held.note_recomputed, plan.layers),
            )
            return EntryNode(span.entry, config, model.worker, neighbours)
        assert span.runner is not None and neighbours is not None  # noqa: PT018 -- not the entry
        machine = Stage(
            rank,
            ring,
            epoch=plan.epoch,
            max_sessions=MAX_OPEN_SESSIONS,
            max_waiting=room.max_waiting,
            context=model.context,
            index=store.prefixes.index,
            span=span.span,
            held=store.held,
            queued=lambda: neighbours.queued_bytes,
        )
        neighbours.share(room.total, lambda: machine.waiting_bytes)
        return StageNode(
            machine,
            span.runner,
            model.worker,
            neighbours,
            store.prefixes.caches,
            model.wire,
            span.help,
            self._held.limits,
        )

    def _budget(self, plan: Plan) -> KvBudget | None:
        """Return the KV budget of this rank, on the entry that of all ranks; None if unknown."""
        if (rooms := self._host.rooms(plan)) is None:
            return None
        budget, rank = self._model.budget(plan, rooms), plan.rank(self._me) or 0
        return KvBudget(budget.rooms[rank : rank + 1]) if rank else budget

    def _pace(self, plan: Plan, prompt: int, others: int) -> PrefillPacing:
        """Return the pace of one prompt, by the latest times of the nodes."""
        return self._model.pace(len(plan.stages), prompt, others, self._host.times(plan))

    def _at_work(self, node: EntryNode | StageNode | None) -> None:
        self._entry = node if isinstance(node, EntryNode) else None
        self.stage = node if isinstance(node, StageNode) else None
        self._host.at_work()


async def arrive(
    link: contract.Link, peer: NodeId, find: Callable[[GroupId], RingRuntime | None]
) -> None:
    """Accept a link for a ring; close it unless ``find`` knows the group of its first message.

    The runtime closes it unless it is for the plan in force or a later one. If cancelled, it is
    closed too.
    """
    idle, runtime, hello = IdleLink(link), None, None
    try:
        async with asyncio.timeout(SILENCE):
            hello = decode(await idle.first())
        runtime = find(hello.group) if isinstance(hello, Hello | KvOffer) else None
    except (TimeoutError, MeshError) as error:
        logger.debug("ring link without a Hello: %s", error)
    finally:
        if runtime is None or runtime.is_closed:
            await link.close()
    if runtime is None or runtime.is_closed:
        return
    match hello:
        case Hello():
            runtime.take(idle, peer, hello)
        case KvOffer():
            runtime.take_caches(idle, peer, hello)


def _totals(budget: KvBudget) -> list[int]:
    return [room.total for room in budget.rooms]
