"""What a node fetches ahead, when it is kept out of plans, and how it retries."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from meshllm.errors import ModelError
from meshllm.names import Digest, GroupId, NodeId
from meshllm.node.weights import WeightFetcher, WeightSupply
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile, RingShare
from meshllm.protocol.weights.holders import ABSENT, FETCHES, LACKS, is_bare
from meshllm.testing.clock import run_virtual
from tests.builders.agreements import ring
from tests.builders.offers import A, B, C
from tests.builders.snapshots import World, charter, profile, weights

T = TypeVar("T")
WHOLE = weights()
PARTS = len(WHOLE) - 1
FOLDER = Path("fetched")


async def at_once(function: Callable[..., T], /, *args: Any) -> T:
    return function(*args)


def bare(found: Profile, *parts: int) -> Profile:
    """Return a profile that has only some parts."""
    own = [WHOLE[at] if at in parts else ABSENT for at in range(PARTS)]
    return replace(found, weights=(*own, WHOLE[-1]))


class Mesh:
    """A node in a mesh: `WeightSupply`'s host, and a fetcher that notes what it is asked."""

    def __init__(self, world: World, me: NodeId = B) -> None:
        self.world: World | None = world
        self.me = me
        self.fetched: list[frozenset[int]] = []
        self.described: list[NodeId] = []
        self.moved: list[frozenset[int]] = []
        self.failures = 0
        """How often the fetcher fails."""
        self.takes_s = 0.0
        self._turn = asyncio.Lock()
        self.whole = WHOLE
        """What the founder has."""
        self.here: dict[int, bytes] = {}
        """The digests of parts that were set aside or fetched."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens before the folder is free for this node."""
        self.withdrawn: Sequence[bytes] = ()
        """What this node has while its profile offers nothing."""
        self.is_described = False
        self.is_linked_to: set[NodeId] | None = None
        """None is all."""
        self.progress = ""
        self.obstacles: list[str] = []
        self.shown: list[str] = []
        """What of its progress it showed."""
        self._news = asyncio.Event()
        self.supply = WeightSupply(me, cast("WeightFetcher", self), self, at_once)

    def change(self, world: World | None) -> None:
        self.world = world
        news, self._news = self._news, asyncio.Event()
        news.set()

    # The host.

    def mesh_view(self) -> MeshView | None:
        return self.world.view(self.me, author=A) if self.world else None

    def linked(self) -> Collection[NodeId]:
        if self.is_linked_to is not None:
            return self.is_linked_to
        return set(self.world.profiles) - {self.me} if self.world else ()

    async def changes(self) -> AsyncIterator[None]:
        while True:
            news = self._news
            yield
            await news.wait()

    def own_weights(self) -> Sequence[bytes]:
        return self.withdrawn or (self.world.profiles[self.me].weights if self.world else ())

    def holds_layers(self) -> bool:
        plan = self.world.followed.get(self.me) if self.world else None
        return plan is not None and plan.rank(self.me) is not None

    async def part_sizes(self) -> Sequence[int]:
        return [1] * PARTS

    async def hash_weights(self) -> None:
        assert self.world
        own, before = self.world.profiles[self.me], self.own_weights()
        mine = [self.here.get(at, before[at]) for at in range(PARTS)]
        if self.withdrawn:
            self.withdrawn = (*mine, WHOLE[-1])
            return
        profiles = {**self.world.profiles, self.me: replace(own, weights=(*mine, WHOLE[-1]))}
        self.change(replace(self.world, profiles=profiles))

    def publish_state(self) -> None:
        if self.supply.obstacle not in self.obstacles[-1:]:
            self.obstacles.append(self.supply.obstacle)
        self.shown.append(self.supply.progress)
        assert self.world
        fetching = {self.me} if self.supply.obstacle else ()
        self.change(replace(self.world, fetching=fetching))

    # The fetcher.

    def place(self, model: Charter) -> SimpleNamespace:
        return SimpleNamespace(is_described=self.is_described, folder=FOLDER)

    def collects(self, folder: Path) -> bool:
        return folder == FOLDER

    async def describe(self, model: Charter, nodes: Sequence[NodeId]) -> Path:
        self.described += nodes
        self._fail()
        return Path("folder")

    async def set_aside(
        self, model: Charter, choose: Callable[[], Awaitable[Mapping[int, bytes]]]
    ) -> None:
        self.meanwhile()
        parts = await choose()
        assert all(self.whole[part] == digest for part, digest in parts.items())
        self.moved.append(frozenset(parts))
        self.here |= dict.fromkeys(parts, ABSENT)

    async def remove_damaged(self, folder: Path, _: Path) -> list[str]:
        assert folder == FOLDER
        return ["part-00001.safetensors"]

    async def fetch(
        self,
        model: Charter,
        parts: Mapping[int, bytes],
        holders: Mapping[NodeId, Collection[int]],
        sizes: Sequence[int],
    ) -> None:
        assert len(sizes) == PARTS
        assert all(any(part in has for has in holders.values()) for part in parts)
        assert all(self.whole[part] == digest for part, digest in parts.items())
        self._fail()
        async with self._turn:
            await asyncio.sleep(self.takes_s)
        self.fetched.append(frozenset(parts))
        self.here |= parts

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ModelError("The holder burns")


def run(
    world: World, scenario: Callable[[Mesh], Coroutine[Any, Any, None]], me: NodeId = B
) -> Mesh:
    async def main() -> Mesh:
        mesh = Mesh(world, me)
        await scenario(mesh)
        return mesh

    return run_virtual(main())


async def supplied(mesh: Mesh) -> None:
    """Run the supply for a minute."""
    assert mesh.world
    mesh.supply.begin(mesh.world.profiles[mesh.me].weights, FOLDER)
    running = asyncio.ensure_future(mesh.supply.run())
    await asyncio.sleep(60)
    running.cancel()
    await asyncio.wait([running])


BOTH = World({A: profile(2), B: bare(profile(2))})
"""The founder holds half of the layers only."""


def test_a_node_fetches_its_layers_before_it_is_planned_with() -> None:
    mesh = run(BOTH, supplied)

    assert mesh.fetched[0] in ({0, 1, 4, 5}, {2, 3})
    assert mesh.obstacles == [FETCHES, ""]


def test_then_it_fetches_what_only_one_node_has() -> None:
    mesh = run(BOTH, supplied)

    assert frozenset().union(*mesh.fetched) == set(range(PARTS))


def test_a_node_that_has_all_weights_fetches_nothing() -> None:
    mesh = run(World({A: profile(2), B: profile(2)}), supplied)

    assert (mesh.fetched, mesh.obstacles) == ([], [])


def other(found: Profile, *parts: int) -> Profile:
    """Return a profile with other weights in some parts."""
    return replace(found, weights=weights(changed=dict.fromkeys(parts, b"o" * 16)))


def test_weights_that_were_fetched_before_and_are_not_the_founders_are_fetched_again() -> None:
    mesh = run(World({A: profile(2), B: other(profile(2), 1, 3)}), supplied)

    assert mesh.moved == [{1, 3}]
    assert frozenset().union(*mesh.fetched) == {1, 3}
    assert mesh.own_weights() == WHOLE


@pytest.mark.parametrize("serves", [False, True], ids=["idle", "serves"])
def test_a_node_that_has_all_weights_fetches_those_that_the_founder_changes(serves: bool) -> None:
    async def scenario(mesh: Mesh) -> None:
        assert mesh.world
        own = ring((B, 0, 4))
        mesh.supply.begin(mesh.own_weights(), FOLDER)
        running = asyncio.ensure_future(mesh.supply.run())
        await asyncio.sleep(60)
        assert (mesh.moved, mesh.fetched) == ([], [])
        founder = other(profile(2), 1)
        mesh.whole = founder.weights
        profiles = {**mesh.world.profiles, A: founder}
        mesh.change(replace(mesh.world, profiles=profiles, followed={B: own} if serves else {}))
        await asyncio.sleep(60)
        if serves:  # it keeps what it serves with, until a plan without it is followed
            assert mesh.own_weights() == WHOLE
            mesh.change(replace(mesh.world, followed={}))
            await asyncio.sleep(60)
        running.cancel()
        await asyncio.wait([running])

    mesh = run(World({A: profile(2), B: profile(2)}), scenario)

    assert mesh.moved == [{1}]
    assert mesh.fetched == [{1}]
    assert mesh.own_weights() == mesh.whole != WHOLE
    assert mesh.obstacles == []


def test_what_another_node_of_the_user_has_replaced_meanwhile_stays() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.meanwhile = lambda: mesh.here.update({1: WHOLE[1]})
        await supplied(mesh)

    mesh = run(World({A: profile(2), B: other(profile(2), 1, 3)}), scenario)

    assert mesh.moved == [{3}]
    assert mesh.fetched == [{3}]
    assert mesh.own_weights() == WHOLE


def test_a_node_whose_weights_are_all_set_aside_awaits_others() -> None:
    mesh = run(World({A: profile(2), B: other(profile(2), *range(PARTS))}), supplied)

    assert mesh.moved == [set(range(PARTS))]
    assert mesh.obstacles == [FETCHES, ""]
    assert mesh.own_weights() == WHOLE


@pytest.mark.parametrize("why", ["it serves", "the founder is away", "nobody has the right ones"])
def test_other_weights_than_the_founders_stay_while(why: str) -> None:
    own = ring((B, 0, 4))
    world = World({A: profile(2), B: other(profile(4), 1), C: other(profile(4), 1)})
    if why == "it serves":
        world = replace(world, followed={B: own})
    elif why == "the founder is away":
        world = replace(world, profiles={node: world.profiles[node] for node in (B, C)})

    async def scenario(mesh: Mesh) -> None:
        mesh.is_linked_to = {C} if why == "nobody has the right ones" else None
        await supplied(mesh)

    assert run(world, scenario).moved == []


def test_damaged_weights_are_removed_from_no_folder_of_the_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(mesh: Mesh) -> None:
        await mesh.supply.remove_damaged(Path("mine"), Path("cache"))
        assert not caplog.messages
        await mesh.supply.remove_damaged(FOLDER, Path("cache"))

    run(BOTH, scenario)

    assert caplog.messages == ["damaged weights are fetched again: part-00001.safetensors"]


def test_a_node_that_no_plan_uses_stays_out_and_says_why() -> None:
    world = World({A: profile(4), B: bare(profile(4, ms=9.0))})

    mesh = run(world, supplied)

    assert mesh.fetched == []
    assert mesh.obstacles[-1].startswith(f"{LACKS}: ")
    assert len(mesh.obstacles[-1]) > len(LACKS) + 2


def test_a_node_of_the_ring_fetches_ahead_without_leaving_it() -> None:
    own = ring((A, 0, 2), (B, 2, 4))
    world = World({A: profile(4, ms=5.0), B: bare(profile(4), 2, 3)}, followed={A: own, B: own})

    mesh = run(world, supplied)

    assert mesh.fetched[0] == {0, 1, 4, 5}
    assert mesh.obstacles == []


def test_without_a_plan_its_memory_counts() -> None:
    mesh = run(World({A: profile(1), B: bare(profile(1))}), supplied)

    assert mesh.fetched == []
    assert mesh.obstacles == [FETCHES, ""]


def test_failures_are_retried_with_backoff() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.failures = 3
        await supplied(mesh)

    mesh = run(BOTH, scenario)

    assert mesh.failures == 0
    assert mesh.fetched
    assert mesh.obstacles == [FETCHES, ""]
    assert mesh.shown == ["", "The holder burns", "", ""]  # to the owner, until it is fetched


def test_layers_of_a_plan_are_fetched_when_it_asks_for_them() -> None:
    async def scenario(mesh: Mesh) -> None:
        await mesh.supply.obtain({0, 2})
        await mesh.supply.obtain({0, 2})
        mesh.failures = 1
        with pytest.raises(ModelError, match="burns"):
            await mesh.supply.obtain({3})

    mesh = run(BOTH, scenario)

    assert mesh.fetched == [{0, 2}]


def test_a_plan_does_not_wait_for_what_is_fetched_ahead() -> None:
    async def scenario(mesh: Mesh) -> None:
        loop = asyncio.get_running_loop()
        mesh.takes_s = 1000.0
        running = asyncio.ensure_future(mesh.supply.run())
        await asyncio.sleep(60)
        begin = loop.time()
        await mesh.supply.obtain({2})
        assert loop.time() - begin == mesh.takes_s
        assert mesh.fetched == [{2}]
        await asyncio.sleep(2 * mesh.takes_s)
        running.cancel()
        await asyncio.wait([running])

    own = ring((A, 0, 2), (B, 2, 4))
    mesh = run(
        World({A: profile(4, ms=5.0), B: bare(profile(4), 3)}, followed={A: own, B: own}), scenario
    )

    assert mesh.fetched[1:] == [{0, 1, 4, 5}]


def test_a_node_that_leaves_ends_what_is_fetched_ahead() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.takes_s = 1000.0
        await supplied(mesh)
        await asyncio.sleep(2 * mesh.takes_s)

    assert run(BOTH, scenario).fetched == []


def test_a_node_that_has_retracted_its_offer_still_fetches() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.withdrawn = bare(profile(2)).weights
        mesh.change(World({A: profile(2), B: replace(profile(2), weights=())}))
        await mesh.supply.obtain({1})
        running = asyncio.ensure_future(mesh.supply.run())
        await asyncio.sleep(60)
        assert not running.done()
        mesh.withdrawn = ()  # it offers again
        mesh.change(BOTH)
        await asyncio.sleep(60)
        running.cancel()
        await asyncio.wait([running])

    mesh = run(BOTH, scenario)

    assert mesh.fetched[0] == {1}
    assert len(mesh.fetched) > 1


def test_the_share_of_a_node_that_fetches_none_falls_to_another() -> None:
    own = ring((A, 0, 2), (B, 2, 4))
    half, none = bare(profile(2), 2, 3), bare(profile(1, ms=99.0))
    world = World({A: profile(2), B: half, C: none}, followed={A: own, B: own}, fetching={C})

    mesh = run(world, supplied)

    assert frozenset().union(*mesh.fetched) == {0, 1, 4, 5}


def test_a_node_to_which_all_parts_came_meanwhile_may_be_planned_with() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.supply.begin(bare(profile(2)).weights, FOLDER)
        running = asyncio.ensure_future(mesh.supply.run())
        await asyncio.sleep(60)
        running.cancel()
        await asyncio.wait([running])

    assert run(World({A: profile(2), B: profile(2)}), scenario).obstacles == [FETCHES, ""]


def test_a_node_that_leaves_its_ring_forgets_why_that_ring_waits_for_it() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.supply.begin(bare(profile(2)).weights, FOLDER)
        mesh.supply.end()

    assert run(BOTH, scenario).obstacles == [FETCHES, ""]


@pytest.mark.parametrize("parts", [(), (2, 3)])
def test_a_node_with_a_part_of_the_model_in_a_folder_of_its_user_fetches_nothing(
    parts: Sequence[int],
) -> None:
    own = bare(profile(2), *parts)

    async def scenario(mesh: Mesh) -> None:
        mesh.supply.begin(own.weights, Path("of the user"))
        await mesh.supply.run()
        await mesh.supply.obtain({0, 1})

    mesh = run(World({A: profile(2), B: own}), scenario)

    assert (mesh.fetched, mesh.obstacles) == ([], [])


def test_nothing_is_obtained_before_the_charter_is_known() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.change(None)
        await mesh.supply.obtain({0})

    assert run(BOTH, scenario).fetched == []


def test_a_model_is_described_by_its_founder_first_once_somebody_is_linked() -> None:
    async def scenario(mesh: Mesh) -> None:
        alone = World({B: bare(profile(2))})
        mesh.change(None)
        found = asyncio.ensure_future(mesh.supply.describe())
        await asyncio.sleep(1)
        mesh.change(alone)
        await asyncio.sleep(1)
        assert mesh.described == []
        mesh.failures = 1
        mesh.change(World({A: profile(2), B: bare(profile(2)), C: profile(2)}))
        assert await found == Path("folder")

    mesh = run(BOTH, scenario)

    assert mesh.described == [A, C, A, C]
    assert mesh.shown == ["The holder burns", ""]


def test_a_model_that_was_fetched_before_needs_no_other_node() -> None:
    async def scenario(mesh: Mesh) -> None:
        mesh.is_described = True
        mesh.change(World({B: bare(profile(2))}))
        assert await mesh.supply.describe() == Path("folder")

    assert run(BOTH, scenario).described == []
    assert is_bare(bare(profile(2)).weights)


def test_a_model_can_be_fetched_from_a_linked_node_that_has_a_part_of_it() -> None:
    async def scenario(mesh: Mesh) -> None:
        assert mesh.world
        profiles = mesh.world.profiles
        other = replace(charter(), config_digest=Digest(b"?" * 32))
        assert mesh.supply.can_fetch(charter(), profiles)
        assert not mesh.supply.can_fetch(charter(), {B: profiles[B]})
        assert not mesh.supply.can_fetch(charter(), {A: bare(profile(2)), C: profile(2)})
        assert not mesh.supply.can_fetch(other, profiles)
        share = RingShare(GroupId(b"1"), 1, weights=(*WHOLE[:-1], other.config_digest[:16]))
        assert mesh.supply.can_fetch(other, {A: replace(profiles[A], shares=(share,))})
        mesh.is_described = True
        assert mesh.supply.can_fetch(charter(), {})

    run(BOTH, scenario)
