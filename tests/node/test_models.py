"""Whole nodes in one process that serve several models, and replicas of one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshllm.bench.ring_table import random_model
from meshllm.errors import ModelError
from meshllm.names import GroupId, NodeId, Span
from meshllm.node import preparation
from meshllm.node.agreement import further_rings, plan_follower, planner, ring_service
from meshllm.node.agreement.further_rings import SecondaryRings
from meshllm.node.agreement.ring_directory import RingDirectory
from meshllm.node.agreement.ring_member import RingMember
from meshllm.node.compute.worker import compute_thread
from meshllm.node.control import NodeControl, control_of
from meshllm.node.node import MeshNode
from meshllm.node.options import ModelOptions
from meshllm.node.preparation import Preparation
from meshllm.node.ring.memory import measure
from meshllm.node.ring.runtime import RingRuntime
from meshllm.protocol.agreement import filling, grouping
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.group_table import Sizes
from meshllm.protocol.agreement.groups import REFUSES, NodeGroups, groups_in, groups_of
from meshllm.request import Answer, Request, Sampling
from meshllm.status import RingState, ServedRing
from tests.builders.node_mesh import PATIENCE_S, Mesh, report_of, until
from tests.builders.own_cache import own_cache
from tests.builders.waiting import until as condition

PROMPT = Request(raw="A ring is", max_tokens=8)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with compute_thread() as worker, AsyncExitStack() as stack:
        yield Mesh(tmp_path, stack, worker)


@pytest.fixture(scope="module")
def random() -> Iterator[str]:
    """The folder of a model of 12 random layers."""
    with random_model("tiny", torch.float32, layers=12) as folder:
        yield str(folder)


def rings(node: MeshNode) -> dict[tuple[str, int], ServedRing]:
    return {(each.model, each.replica): each for each in report_of(node).rings}


def serving(node: MeshNode) -> set[tuple[str, int]]:
    return {name for name, ring in rings(node).items() if ring.state is RingState.SERVING}


async def ask(node: MeshNode, **changes: Any) -> tuple[int, ...]:
    control: NodeControl = control_of(node)
    request = replace(PROMPT, ignores_end=True, **changes)
    async with asyncio.timeout(PATIENCE_S):
        *_, last = [event async for event in control.generate(request)]
    assert isinstance(last, Answer)
    return last.tokens


async def both(nodes: list[MeshNode], claim: Callable[[MeshNode], bool]) -> None:
    for node in nodes:
        await until(lambda node=node: claim(node), node)  # type: ignore[misc]  # a closure


async def test_two_models_are_served_by_a_ring_each(mesh: Mesh, random: str) -> None:
    own = random
    a = await mesh.start("a", model="builtin", more_models=(own,))
    b = await mesh.start("b", join=await a.create_ticket(), model="builtin", more_models=(own,))
    nodes = [a, b]
    await both(nodes, lambda node: serving(node) == {("builtin", 0)})
    first = await ask(b)

    served = await control_of(a).serve(ModelOptions(own, aliases=("tiny",)))

    both_models = {("builtin", 0), (own, 0)}
    await both(nodes, lambda node: serving(node) == both_models)
    assert {ring.is_own for ring in rings(a).values()} == {True, False}
    assert [each.name for each in await control_of(b).models()] == ["builtin", own]
    assert [await ask(node) for node in nodes] == [first] * 2
    answers = {await ask(node, model=name) for node in nodes for name in (own, "tiny", served.key)}
    assert len(answers) == 1
    assert answers != {first}
    with pytest.raises(ModelError, match="No node provides"):
        await ask(a, model="tin")

    control_of(b).stop("tiny")

    await both(nodes, lambda node: list(rings(node)) == [("builtin", 0)])
    await both(nodes, lambda node: serving(node) == {("builtin", 0)})
    assert [await ask(node) for node in nodes] == [first] * 2


async def test_two_quantisations_of_a_name_are_served_by_a_ring_each(mesh: Mesh) -> None:
    a = await mesh.start("a", model="builtin", quant="int4")
    b = await mesh.start("b", join=await a.create_ticket(), model="builtin", quant="int4")
    nodes = [a, b]
    await both(nodes, lambda node: serving(node) == {("builtin", 0)})
    drawn = Sampling(temperature=2.0, seed=1)  # such a text depends on every weight
    small = await ask(b, sampling=drawn)

    served = await control_of(a).serve(ModelOptions("builtin", quant="none"))

    precise = served.name
    assert precise == f"builtin@{served.dtype}"
    await both(nodes, lambda node: serving(node) == {("builtin", 0), (precise, 0)})
    assert rings(a)[precise, 0].is_own  # `b` holds no other quantisation than its own
    names = [(each.name, each.quant) for each in await control_of(b).models()]
    assert names == [("builtin", "int4"), (precise, "none")]
    answers = {
        name: [await ask(node, model=name, sampling=drawn) for node in nodes]
        for name in ("", precise, "builtin@int4")
    }
    assert answers[""] == answers["builtin@int4"] == [small] * 2
    assert answers[precise][0] == answers[precise][1] != small

    assert control_of(b).stop(precise).model == precise

    await both(nodes, lambda node: serving(node) == {("builtin", 0)})
    assert [await ask(node, sampling=drawn) for node in nodes] == [small] * 2


async def test_a_node_with_a_free_choice_holds_what_another_can_send(
    mesh: Mesh, random: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path))
    a = await mesh.start("a", model="builtin", more_models=(random,))
    b = await mesh.start("b", join=await a.create_ticket())
    await both([a, b], lambda node: serving(node) == {("builtin", 0)})

    served = await control_of(a).serve(ModelOptions(random))

    # Only `a` has the model: nobody can send it before `a` holds it, so `b` keeps the first one.
    await both([a, b], lambda node: serving(node) == {("builtin", 0), (random, 0)})
    assert {name for name, ring in rings(a).items() if ring.is_own} == {(random, 0)}
    await until(lambda: served.key in [key.hex() for key in b.machine.profiles[b.me].models], b)


async def test_a_founder_in_another_ring_says_who_may_read_prompts(mesh: Mesh, random: str) -> None:
    a = await mesh.start("a", model="builtin", more_models=(random,))
    b = await mesh.start("b", join=await a.create_ticket(), model="builtin")
    await both([a, b], lambda node: serving(node) == {("builtin", 0)})
    await control_of(a).serve(ModelOptions(random))
    await both([a, b], lambda node: serving(node) == {("builtin", 0), (random, 0)})
    await mesh.kill("a")

    a = await mesh.start("a", model=random, trust=("b",))

    wanted = tuple(sorted((a.me, b.me)))
    await both([a, b], lambda node: serving(node) == {("builtin", 0), (random, 0)})
    assert {name for name, ring in rings(a).items() if ring.is_own} == {(random, 0)}
    await until(lambda: b.machine.charter is not None and b.machine.charter.entries == wanted, b)


async def test_one_node_serves_two_models_at_once(mesh: Mesh, random: str) -> None:
    a = await mesh.start("a", model="builtin", more_models=(random,))
    await until(lambda: serving(a) == {("builtin", 0)}, a)
    first, entry = await ask(a), a.ring_member.rank
    assert entry is not None
    room = entry.budget.rooms[0].total

    await control_of(a).serve(ModelOptions(random))

    await until(lambda: serving(a) == {("builtin", 0), (random, 0)}, a)
    assert a.ring_member.rank is entry  # its ring went on
    assert entry.budget.rooms[0].total < room
    assert all(ring.is_own for ring in rings(a).values())
    answers = await asyncio.gather(ask(a), ask(a, model=random))
    assert answers[0] == first != answers[1]
    own = a.machine.profiles[a.me]
    assert [share.model for share in own.shares] == [random]
    assert 0 < own.shares[0].memory_bytes < own.memory_bytes
    own_rings = [each.status for each in rings(a).values() if each.status]
    assert [each.state for each in own_rings] == [RingState.SERVING] * 2
    assert [len(each.stages) for each in own_rings] == [1, 1]
    assert own_rings[0].digest != own_rings[1].digest
    assert all(each.execution and each.measured for each in own_rings)
    assert own_rings[1].measured != own_rings[0].measured
    memory = (await control_of(a).status()).memory
    assert 0 < memory.other < memory.process
    assert memory.weights > max(_weights(each) for each in a.state.members)

    control_of(a).stop(random)

    await until(lambda: not a.machine.profiles[a.me].shares, a)
    assert list(rings(a)) == [("builtin", 0)]
    assert await ask(a) == first
    await until(lambda: entry.budget.rooms[0].total == room, a)
    assert a.ring_member.rank is entry


async def test_a_draft_model_is_for_the_first_model_only(mesh: Mesh, random: str) -> None:
    a = await mesh.start("a", model="builtin", more_models=(random,), draft="builtin")
    await until(lambda: serving(a) == {("builtin", 0)}, a)

    await control_of(a).serve(ModelOptions(random))

    await until(lambda: serving(a) == {("builtin", 0), (random, 0)}, a)
    first, further = (each.model for each in a.state.members)
    assert first is not None
    assert first.draft is not None
    assert further is not None
    assert further.draft is None  # no share has memory for it


def _weights(member: RingMember) -> int:
    return measure([], member.model.runners if member.model else ()).weights


async def test_a_model_that_nobody_uses_makes_room_for_one_that_somebody_asks_for(
    mesh: Mesh, random: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "MAX_RINGS", 1)  # as if there were no memory for both
    a = await mesh.start("a", model="builtin", more_models=(random,), keep_s=0.5)
    await until(lambda: serving(a) == {("builtin", 0)}, a)
    await control_of(a).serve(ModelOptions(random))
    await until(lambda: (random, 0) in rings(a), a)
    first = await ask(a)
    assert serving(a) == {("builtin", 0)}

    other = await ask(a, model=random)

    assert serving(a) == {(random, 0)}
    assert other != first
    assert await ask(a) == first
    assert serving(a) == {("builtin", 0)}


async def test_a_further_model_that_cannot_be_opened_leaves_the_first(
    mesh: Mesh, random: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await mesh.start("a", model="builtin", more_models=(random,))
    await until(lambda: serving(a) == {("builtin", 0)}, a)
    first, measure_offer, failed = await ask(a), Preparation.offer, asyncio.Event()

    async def offer(self: Preparation, model: Any, profile: Any, *, is_further: bool) -> Any:
        if is_further:
            failed.set()
            raise ModelError("`model.safetensors` is damaged")
        return await measure_offer(self, model, profile)

    monkeypatch.setattr(Preparation, "offer", offer)
    served = await control_of(a).serve(ModelOptions(random))

    async with asyncio.timeout(PATIENCE_S):
        await failed.wait()
    await until(lambda: served.key not in [key.hex() for key in a.machine.profiles[a.me].models], a)
    await until(lambda: not a.service.further.rings, a)
    assert not a.machine.profiles[a.me].shares
    assert not a.stopped.done()
    assert await ask(a) == first


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all nodes measure the same speed, whatever else this machine does."""
    speed = SimpleNamespace(layer_s=((1, 0.001),), head_s=0.001)
    monkeypatch.setattr(preparation, "measure_speed", lambda *_: speed)


async def three_nodes_of_two_rings(mesh: Mesh, random: str) -> tuple[MeshNode, MeshNode, MeshNode]:
    """Start nodes of which the first has the last layers of both rings."""
    first = Span(0, 8)
    a = await mesh.start("a", model=random, layers=Span(8, 12), replicas=2)
    b = await mesh.start("b", join=await a.create_ticket(), model=random, layers=first)
    await both([a, b], lambda node: (random, 0) in serving(node))
    c = await mesh.start("c", join=await a.create_ticket(), model=random, layers=first)
    return a, b, c


@pytest.mark.usefixtures("alike")
async def test_a_replica_shares_a_node_with_another_one(mesh: Mesh, random: str) -> None:
    nodes = a, b, c = await three_nodes_of_two_rings(mesh, random)

    await both([a, b, c], lambda node: serving(node) == {(random, 0), (random, 1)})

    stages = {
        replica: [(each.name, str(each.layers)) for each in ring.stages]
        for (_, replica), ring in rings(b).items()
    }
    assert stages == {
        replica: [(entry, "0:8"), ("a", "8:12")] for replica, entry in enumerate(("b", "c"))
    }
    assert [each.is_own for each in rings(a).values()] == [True, True]
    assert len({each.status.digest for each in rings(a).values() if each.status}) == 2
    assert len({await ask(node) for node in nodes}) == 1
    answers = await asyncio.gather(*(ask(a, affinity=str(number)) for number in range(8)))
    assert len(set(answers)) == 1
    own_rings = [each.status for each in rings(a).values() if each.status]
    assert [bool(each.measured) for each in own_rings] == [True, True]  # both have answered


async def test_the_entry_of_two_rings_of_a_model_answers_in_the_one_that_is_named(
    mesh: Mesh, random: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group_nodes(view: MeshView) -> dict[NodeId, NodeGroups]:
        """Let `a` be alone in all rings, as no plan does: it would gain nothing."""
        first, *further = (group.id for group in groups_of(view.charter))
        shares = dict.fromkeys(further, Sizes.of(view.charter).whole)
        named = (node for node, profile in view.profiles.items() if profile.name == "a")
        return {node: NodeGroups(first, shares) for node in named}

    found, find = list[GroupId](), RingDirectory._find

    def noted(self: RingDirectory, model: str, group: GroupId | None) -> RingMember:
        member = find(self, model, group)
        found.append(member.group)
        return member

    with monkeypatch.context() as forced:
        forced.setattr(RingDirectory, "_find", noted)
        forced.setattr(planner, "group_nodes", group_nodes)
        forced.setattr(grouping, "_sharing", lambda *_: frozenset())
        a = await mesh.start("a", model=random, replicas=2)
        b = await mesh.start("b", join=await a.create_ticket(), model=random)
        await both([a, b], lambda node: serving(node) == {(random, 0), (random, 1)})
        entries = b.rings.serving_entries()
        assert [entry.node for entry in entries] == [a.me] * 2
        groups = [each.group for each in a.state.members]
        assert [entry.group for entry in entries] == groups

        answers = await asyncio.gather(*(ask(b, affinity=str(number)) for number in range(8)))

        assert len(set(answers)) == 1
        assert {*found} == {*groups}

    # The second ring of `a` ends, as `b` is to have one of its own.
    await both([a, b], lambda node: [at.name for at in rings(node)[random, 1].stages] == ["b"])
    await both([a, b], lambda node: serving(node) == {(random, 0), (random, 1)})
    assert {await ask(node) for node in (a, b)} == {answers[0]}


@pytest.mark.usefixtures("alike")
async def test_a_share_that_cannot_be_served_leaves_the_other_ring_of_its_model(
    mesh: Mesh, random: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_offer, failed = Preparation.offer, asyncio.Event()

    async def offer(self: Preparation, model: Any, profile: Any, *, is_further: bool) -> Any:
        if is_further:
            failed.set()
            raise ModelError("`model.safetensors` is damaged")
        return await measure_offer(self, model, profile)

    monkeypatch.setattr(Preparation, "offer", offer)
    monkeypatch.setattr(further_rings, "FIRST_RETRY_S", 2 * PATIENCE_S)
    calls = count_calls(monkeypatch, "_ended", "_change")
    a, b, _ = await three_nodes_of_two_rings(mesh, random)

    async with asyncio.timeout(PATIENCE_S):
        await failed.wait()
    await until(lambda: not a.service.further.rings, a)
    await condition(lambda: "_change" in calls[calls.index("_ended") :])  # else it begins again
    assert not a.service.further.rings
    assert [each.obstacle for each in b.machine.states[a.me].further] == [REFUSES]
    assert groups_in(b.machine.states[a.me]) == (a.machine.states[a.me].group,)
    assert not a.stopped.done()
    assert len(a.machine.profiles[a.me].models) == 1
    assert serving(b) == {(random, 0)}
    assert len(await ask(b)) == 8


async def test_an_answer_ends_before_its_model_is_stopped(
    mesh: Mesh, random: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(further_rings, "MOVE_S", PATIENCE_S)  # however slow this machine is
    monkeypatch.setattr(plan_follower, "END_S", PATIENCE_S)
    a = await mesh.start("a", model="builtin", more_models=(random,))
    await until(lambda: serving(a) == {("builtin", 0)}, a)
    served = await control_of(a).serve(ModelOptions(random))
    await until(lambda: len(serving(a)) == 2, a)
    begun = asyncio.Event()

    async def answer() -> Answer:
        request = Request(raw="A ring is", max_tokens=500, ignores_end=True, model=served.key)
        async for event in control_of(a).generate(request):
            if isinstance(event, Answer):
                return event
            begun.set()
        raise AssertionError

    answering = asyncio.ensure_future(answer())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        control_of(a).stop(served.key)
        assert len((await answering).tokens) == 500
    await until(lambda: not a.service.further.rings, a)


async def test_a_first_ring_that_ends_interrupts_no_answer_of_a_further_one(
    mesh: Mesh, random: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_service, "MOVE_S", 0.0)  # it is late at once
    monkeypatch.setattr(further_rings, "MOVE_S", 0.0)
    looks = count_calls(monkeypatch, "_change")
    sizes = {"layers": 6}, {"layers": 5}
    with ExitStack() as models:
        third, fourth = [
            str(models.enter_context(random_model("tiny", torch.float32, **size))) for size in sizes
        ]
        a = await mesh.start("a", model="builtin")
        more = random, third, fourth
        b = await mesh.start("b", join=await a.create_ticket(), model="builtin", more_models=more)
        await both([a, b], lambda node: serving(node) == {("builtin", 0)})
        first = await control_of(b).serve(ModelOptions(random))
        await both([a, b], lambda node: serving(node) == {("builtin", 0), (random, 0)})
        await control_of(b).serve(ModelOptions(third))
        await both([a, b], lambda node: len(serving(node)) == 3)
        (further,) = b.service.further.rings.values()
        runtime, text = further.server.member.runtime, await ask(a, model=third)
        assert runtime is not None

        with monkeypatch.context() as busy:
            busy.setattr(RingRuntime, "sessions", 1)  # an answer that does not end
            control_of(b).stop(first.key)
            await until(lambda: (random, 0) not in rings(b), b)
            await called(looks, 3)

            assert further.server.member.runtime is runtime
            assert runtime.entry is not None
            assert await ask(a, model=third) == text
            assert list(b.service.further.rings.values()) == [further]

            # A new ring waits for the memory of both: not longer than `DRAIN_S`.
            await control_of(b).serve(ModelOptions(fourth))
            looks.clear()
            await called(looks, 3)
            assert list(b.service.further.rings.values()) == [further]
            busy.setattr(further_rings, "DRAIN_S", 0.0)
            await until(lambda: further not in b.service.further.rings.values(), b)

        # Its ring gets all of the memory that the new one leaves.
        models_of = {("builtin", 0), (third, 0), (fourth, 0)}
        await both([a, b], lambda node: serving(node) == models_of)
        assert await ask(a, model=third) == text


def count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Note each call of methods of the further rings of a node."""
    calls = list[str]()

    def noting(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            calls.append(name)
            method(*arguments)

        return noted

    for name in names:
        monkeypatch.setattr(SecondaryRings, name, noting(name, getattr(SecondaryRings, name)))
    return calls


async def called(calls: list[str], more: int) -> None:
    """Wait for so many further calls."""
    most = len(calls) + more
    await condition(lambda: len(calls) >= most)  # by a timer of the node
