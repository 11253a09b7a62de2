"""Whole nodes lose a rank, or a link, at some message of an answer: what is computed again."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest

from meshllm.model import sampling
from meshllm.names import LossCause, NodeId, show
from meshllm.node.agreement.plan_follower import KEEP_S
from meshllm.node.ring.kv_transfer import KvSender
from meshllm.node.session import generation
from meshllm.protocol.kv_cache.prefix_matching import PrefixCache
from meshllm.protocol.planning.plan import Plan
from meshllm.request import Request, Sampling
from tests.simulation.asking import Asked, read
from tests.simulation.mesh_world import member
from tests.simulation.node_world import shortcuts, simulate, told
from tests.simulation.one_loss import OneLoss
from tests.simulation.schedule import Schedule
from tests.simulation.toy import LAYERS, reference
from tests.simulation.world import World

REQUEST = Request(raw="abcdefgh" * 5, sampling=Sampling(0.8, seed=2), max_tokens=12)
NODES = range(4)
ROLES = ("entry", "middle", "last")
UNSEEN = 2  # tokens that an entry may have sampled when it is killed, and that nobody has heard of
MESSAGES = (4, 25, 45)
MORE = [each for each in range(1, 50, 3) if each not in MESSAGES]
HOP_S = 0.01  # s of virtual time that each message takes when hops are counted
LINKING = 8
"""Hops from a broken link until all ranks are linked: one to notice it, two for a connection, four
for the handshake, and a Hello."""


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with shortcuts():
        yield


@dataclass
class RequestCounters:
    """What one answer with a loss took."""

    plans: tuple[Plan | None, Plan | None] = (None, None)
    """Before the loss, and at the end."""
    rows: Counter[LossCause] = field(default_factory=Counter)
    """Computed again, times layers, by the cause that their nodes found."""
    picks: int = 0
    is_within: bool = False
    """Whether the loss came before the end of the answer."""
    hops: tuple[float, float] = (0.0, 0.0)
    """Messages one after the other: from the loss of a link until all ranks are linked again, and
    from then to the next token."""

    @property
    def recomputed(self) -> int:
        return self.rows.total()

    @property
    def moved(self) -> int:
        """Layers that another node holds."""
        before, after = map(owners, self.plans)
        return sum(one != other for one, other in zip(before, after, strict=True))


def number_of(node: NodeId) -> int:
    """Return the machine of a node."""
    return next(at for at in NODES if member(at)[0].node == node)


def owners(plan: Plan | None) -> list[NodeId]:
    assert plan is not None
    return [stage.node for stage in plan.stages for _ in range(len(stage.span))]


class LossWithin(OneLoss):
    """A fourth node asks a ring of three; after so many messages a rank is lost, or its link."""

    role = 0
    messages = 0
    is_blink = False
    """Only the link to the next rank is lost."""
    leaves = False
    """The rank is told to leave, and messages take time."""
    pauses_s = 0.0
    """The rank stops for so long, without which the others have no room for all layers."""
    request = REQUEST

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        world.capacity = dict.fromkeys(NODES, LAYERS)
        world.ring_size = len(ROLES)
        self.counts = RequestCounters()

    async def run(self) -> None:
        world = self.world
        if self.pauses_s:
            world.capacity = {0: 2, 1: 1, 2: 1, 3: 0}  # layers, all of which are needed
        for number in NODES:
            world.start(number)
        await self._until(lambda: len(self._served()) == len(ROLES))
        await asyncio.sleep(5.0)
        (ingress,) = {*NODES}.difference(self._served())
        before = world.nodes[ingress].ring_member.plan
        assert before is not None
        ranks = [number_of(stage.node) for stage in before.stages]
        await self._answer(ingress, ranks[self.role], ranks[(self.role + 1) % len(ranks)])
        after = world.nodes[ingress].ring_member.plan
        self.counts.plans = before, after
        for each in world.nodes.values():
            self.counts.rows += each.state.recomputed
        world.is_over = True
        for number in list(world.running):
            world.crash(number, silently=False)
        await asyncio.sleep(1.0)

    async def _answer(self, ingress: int, victim: int, after: int) -> None:
        """Ask, and let the loss happen once so many messages have been sent since."""
        world, at, left = self.world, self.world.running[ingress], self.messages
        travel_s, pick = world.network.travel_s, sampling.sample_token
        asked = Asked(1, ingress, at.process, self.request, None)
        lost_at, picked_at = 0.0, list[float]()

        def lose() -> None:
            nonlocal lost_at
            self.counts.is_within, lost_at = not asked.outcome, world.loop.time()
            self._lose(victim, after)

        def counted(way: tuple[int, int]) -> float:
            nonlocal left
            left -= 1
            if left == 0:
                world.loop.call_soon(lose, context=world.network.context)
            return HOP_S if self.is_blink or self.leaves else travel_s(way)

        def counted_sample(*args: object, **kwargs: object) -> int:
            self.counts.picks += 1
            picked_at.append(world.loop.time())
            return pick(*args, **kwargs)  # type: ignore[arg-type]

        assert at.node is not None
        with (
            patch.object(world.network, "travel_s", counted),
            patch.object(generation, "sample_token", counted_sample),
        ):
            work = read(at.node, asked, world.fault)
            async with asyncio.timeout(60):
                await world.loop.create_task(work, context=at.process.context.copy())
        if asked.outcome != "answered":
            world.fault(asked.outcome)
        if self.is_blink:
            self._count_hops(lost_at, picked_at)

    def _lose(self, victim: int, after: int) -> None:
        if self.is_blink:
            self.world.network.blink(victim, after)
        elif self.leaves:
            self.world.leave(victim)
        elif self.pauses_s:
            self.world.pause(victim, self.pauses_s)
        else:
            self.world.crash(victim, silently=False)

    def _count_hops(self, lost_at: float, picked_at: list[float]) -> None:
        """Count the hops of a resume in virtual time, of which nothing but messages takes any."""
        now, histories = self.world.loop.time(), self._histories()
        opened = [now - ago for each in histories for state, ago in each if state == "open"]
        opened = [at for at in opened if at > lost_at]
        linked_at = max(opened)
        next_at = min(at for at in picked_at if at > linked_at)
        assert len(opened) == len(ROLES)  # each rank linked once again
        spans = linked_at - lost_at, next_at - linked_at
        self.counts.hops = spans[0] / HOP_S, spans[1] / HOP_S

    def _histories(self) -> list[Sequence[tuple[str, float]]]:
        return [each.ring_member.history for each in self.world.nodes.values()]


def answer(
    role: int, messages: int, *, is_blink: bool = False, pauses_s: float = 0.0
) -> RequestCounters:
    """Lose a rank, or its link, after so many messages of an answer, which must be right."""
    schedules = list[LossWithin]()

    def make(world: World, seed: int) -> Schedule:
        schedules.append(LossWithin(world, seed))
        schedules[-1].role, schedules[-1].messages = role, messages
        schedules[-1].is_blink, schedules[-1].pauses_s = is_blink, pauses_s
        return schedules[-1]

    world = simulate(1, make)

    assert not world.wrong, told(world)
    return schedules[0].counts


LONG = replace(REQUEST, sampling=Sampling(0.8, seed=16), max_tokens=80)
BEGUN = 60
"""Messages of an answer, of which a few tokens are written."""
LATE = 12
"""Rows that a session may write while the ring changes: half a second of the longest answers."""


def answer_over_a_leave(role: int, request: Request = LONG) -> RequestCounters:
    """Let a rank leave in order within a long answer, which must be right."""
    schedules = list[LossWithin]()

    def make(world: World, seed: int) -> Schedule:
        schedules.append(LossWithin(world, seed))
        schedules[-1].role, schedules[-1].messages = role, BEGUN
        schedules[-1].leaves, schedules[-1].request = True, request
        return schedules[-1]

    world = simulate(1, make)

    assert not world.wrong, told(world)
    return schedules[0].counts


@pytest.mark.parametrize("role", range(len(ROLES)), ids=ROLES)
def test_what_a_leaving_rank_hands_over_is_not_computed_again(role: int) -> None:
    counts = answer_over_a_leave(role)

    assert counts.is_within
    assert 0 < counts.moved < LAYERS
    assert counts.recomputed <= LATE * counts.moved
    assert counts.picks == len(reference(LONG)[1])


def test_rows_that_were_not_handed_over_are_computed_again() -> None:
    """A mutant: nothing is sent."""

    async def nothing(_: KvSender) -> None:
        """Send none."""

    with patch.object(KvSender, "catch_up", nothing):
        counts = answer_over_a_leave(ROLES.index("middle"))

    assert counts.recomputed > len(LONG.raw or "") * counts.moved


@pytest.mark.parametrize("role", range(len(ROLES)), ids=ROLES)
def test_what_only_some_nodes_may_see_is_computed_again_after_a_leave(role: int) -> None:
    """Nothing is handed over, and the answer goes on in a ring of nodes that it names."""
    names = tuple(show(member(at)[0].node) for at in NODES)

    counts = answer_over_a_leave(role, replace(LONG, trusted=names))

    assert counts.is_within
    assert counts.recomputed > len(LONG.raw or "") * counts.moved
    assert counts.picks == len(reference(LONG)[1])


def held_at_most() -> int:
    """Return the rows that a rank may hold before the last token is sampled."""
    assert REQUEST.raw is not None
    return len(REQUEST.raw) + len(reference(REQUEST)[1]) - 1


WHICH = pytest.mark.parametrize("role", range(len(ROLES)), ids=ROLES)
WHEN = pytest.mark.parametrize(
    "messages", [*MESSAGES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)]
)


@WHICH
@WHEN
def test_only_lost_layers_are_computed_again_and_no_token_twice(messages: int, role: int) -> None:
    counts = answer(role, messages)

    assert counts.is_within
    assert 0 < counts.moved < LAYERS
    assert counts.recomputed <= held_at_most() * counts.moved
    assert counts.rows.keys() <= {LossCause.NODE_LOST}
    assert counts.picks <= len(reference(REQUEST)[1]) + (0 if role else UNSEEN)


@WHICH
@WHEN
def test_a_link_that_is_lost_for_a_moment_costs_no_row_and_no_second_round_trip(
    messages: int, role: int
) -> None:
    counts = answer(role, messages, is_blink=True)
    linking, resuming = counts.hops

    assert counts.is_within
    assert (counts.moved, counts.recomputed) == (0, 0)
    assert counts.picks == len(reference(REQUEST)[1])
    assert linking == pytest.approx(LINKING)
    # What each rank continues from goes round once, with the rows behind it. If the entry was the
    # last to hear of the loss, the request reaches it a hop later.
    assert len(ROLES) <= round(resuming) <= len(ROLES) + 1


@WHICH
def test_a_node_that_comes_back_and_that_no_other_could_replace_costs_no_row(role: int) -> None:
    counts = answer(role, MESSAGES[-1], pauses_s=KEEP_S / 2)

    assert counts.is_within
    assert (counts.moved, counts.recomputed) == (0, 0)
    assert counts.picks <= len(reference(REQUEST)[1]) + (0 if role else UNSEEN)


def test_rows_of_kept_layers_that_are_computed_again_are_found() -> None:
    """A mutant: the entry continues from no cache."""
    none: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    with patch.object(PrefixCache, "resume", none), patch.object(PrefixCache, "find", none):
        counts = answer(ROLES.index("middle"), MESSAGES[-1])

    assert counts.recomputed > held_at_most() * counts.moved
