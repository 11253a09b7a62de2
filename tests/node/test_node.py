"""Whole nodes in one process: they connect, form a ring, serve, join and leave."""

import asyncio
import errno
import pkgutil
import re
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from meshllm.api.access.accounts import Accounts, KeyLimits
from meshllm.api.generation.service import Service
from meshllm.api.v1.embeddings import numbers
from meshllm.errors import Busy, MeshError, ModelError, NotAuthorised, UserError
from meshllm.model.files.source import resolve
from meshllm.model.steps.runner import Runner
from meshllm.names import Span, show
from meshllm.node.agreement import offer as offer_module
from meshllm.node.agreement import ring_service
from meshllm.node.agreement.own_state import HANGS
from meshllm.node.client import open_mesh_client
from meshllm.node.compute.worker import Worker, compute_thread
from meshllm.node.control import control_of
from meshllm.node.membership import state_store
from meshllm.node.membership.saved_records import restore_records
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.endpoints import Endpoints
from meshllm.node.node import MeshNode
from meshllm.node.options import InferenceConfig, ModelOptions
from meshllm.node.preparation import Preparation
from meshllm.node.provider import EngineClient, Provider
from meshllm.node.provider import provider as provider_module
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.runtime import RingRuntime
from meshllm.node.ring.span_loader import LoadedSpan, RankPart, SpanLoader
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.mesh import Mesh as Membership
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.planning.plan import Standby
from meshllm.protocol.trust.credential import Role
from meshllm.request import Answer, Piece, Request
from meshllm.status import RingState
from meshllm.strict_json import WrongField
from meshllm.transport.contract import Listener
from meshllm_loopback import LoopbackTransport
from tests.builders.disk_threads import note_threads
from tests.builders.fake_engine import FakeEngine, serving
from tests.builders.node_mesh import PATIENCE_S, Mesh, report_of, until
from tests.builders.waiting import timers_fired
from tests.builders.waiting import until as condition

QUESTION = Request(turns=({"role": "user", "content": "What is a ring?"},))
_REFERENCE = list[str]()  # the answer to the question, once it is known


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with compute_thread() as worker, AsyncExitStack() as stack:
        yield Mesh(tmp_path, stack, worker)


def spans(node: MeshNode) -> list[str]:
    ring = report_of(node).ring
    return [str(each.layers) for each in ring.stages] if ring.state is RingState.SERVING else []


def states(node: MeshNode) -> dict[str, str]:
    return {each.name: each.state for each in report_of(node).nodes}


def standbys(node: MeshNode) -> tuple[Standby, ...]:
    return node.agreement.standbys if node.agreement else ()


async def ask(node: Any, request: Request = QUESTION) -> str:
    async with asyncio.timeout(PATIENCE_S):
        events = [event async for event in node.generate(request)]
    said = "".join(event.text for event in events if isinstance(event, Piece))
    assert isinstance(events[-1], Answer)
    assert events[-1].text == said
    return said


async def embed(node: Any) -> list[float]:
    async with asyncio.timeout(PATIENCE_S):
        *_, last = [event async for event in node.generate(Request(raw="A ring", embeds=True))]
    assert isinstance(last, Answer)
    return numbers(last.embedding)


async def reference() -> str:
    """Return the answer of one process; it is computed once."""
    if not _REFERENCE:
        options = RingOptions(nodes=1, inference=InferenceConfig(threads=1))
        async with open_local_ring(resolve("builtin"), options) as ring:
            _REFERENCE.append(await ask(ring))
    return _REFERENCE[0]


async def test_three_nodes_form_a_ring_and_each_answers_like_one_process(mesh: Mesh) -> None:
    a = await mesh.start("a", members=3)
    b, c = [await mesh.start(name, join=await a.create_ticket()) for name in "bc"]
    for node in (a, b, c):
        await until(lambda node=node: len(spans(node)) == 3, node)  # type: ignore[misc]  # a closure

    texts = [await ask(control_of(node)) for node in (a, b, c)]
    first, *others = [await embed(control_of(node)) for node in (a, b, c)]

    assert texts == [await reference()] * 3
    assert others == [pytest.approx(first, abs=0.02)] * 2  # of bfloat16
    assert sum(each * each for each in first) == pytest.approx(1)
    plans = [report_of(node).ring for node in (a, b, c)]
    assert len({(plan.epoch, plan.digest, plan.stages) for plan in plans}) == 1
    assert states(b) == dict.fromkeys("abc", "serving")
    for node in (a, b, c):
        (engine,) = [each.execution for each in report_of(node).nodes if each.is_self]
        assert "; attention: " in engine


async def test_a_standby_takes_over_layers_that_it_loaded_in_advance(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders, build = list[SpanLoader](), SpanLoader._build

    def note(loader: SpanLoader, span: Span, **more: Any) -> Runner:
        builders.append(loader)
        return build(loader, span, **more)

    monkeypatch.setattr(SpanLoader, "_build", note)
    a = await mesh.start("a", members=2)
    b, c = [await mesh.start(name, join=await a.create_ticket()) for name in "bc"]
    nodes = {node.me: node for node in (a, b, c)}

    def prepared() -> list[MeshNode]:
        """Return the only node without layers, once it has loaded some; a busy ring may re-form."""
        spare = [node for node in nodes.values() if node.ring_member.rank is None]
        runtimes = [node.ring_member.runtime for node in spare]
        return spare if [each and each.preloaded is not None for each in runtimes] == [True] else []

    await condition(prepared)
    (standby,) = prepared()
    runtime = standby.ring_member.runtime
    assert runtime is not None
    assert runtime.preloaded is not None
    (about,) = [each.execution for each in report_of(standby).nodes if each.is_self]
    assert re.fullmatch(r"layers \d+:\d+ are loaded in advance", about)
    (stays,) = [stage.node for stage in runtime.preloaded.stages if stage.node != standby.me]
    (lost,) = nodes.keys() - {stays, standby.me}
    builders.clear()

    await mesh.kill(nodes[lost].name)

    await until(lambda: standby.ring_member.rank is not None, standby)
    assert runtime._model._loader not in builders


class HangingWorker(Worker):
    """The compute thread of other nodes, as seen by one that believes it hangs."""

    hung_s = 0.0


async def test_a_node_whose_compute_thread_hangs_is_left_out_until_it_responds(mesh: Mesh) -> None:
    alone = await reference()
    a = await mesh.start("a", members=2)
    worker = mesh.worker = HangingWorker(mesh.worker._executor)
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: len(spans(a)) == 2, a)

    worker.hung_s = 4.0

    await until(lambda: Standby(b.me, HANGS) in standbys(a), a)
    await until(lambda: len(spans(a)) == 1, a)
    assert await ask(control_of(a)) == alone

    worker.hung_s = 0.0

    await until(lambda: len(spans(a)) == 2, a)


async def test_a_node_changes_nothing_of_the_process_it_is_in(mesh: Mesh) -> None:
    before = sys.getswitchinterval()

    await mesh.start("a")

    assert sys.getswitchinterval() == before


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [(MemoryError(), True), (ModelError("damaged"), False)],
    ids=["no memory", "another error"],
)
async def test_a_span_that_cannot_be_loaded_is_retried_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, error: Exception, *, is_memory: bool
) -> None:
    monkeypatch.setattr(offer_module, "FIRST_RETRY_S", 0.01)
    load, failing = SpanLoader._load, [error, error]

    def fail(self: SpanLoader, part: RankPart) -> LoadedSpan:
        if failing and part.is_alone:
            raise failing.pop()
        return load(self, part)

    monkeypatch.setattr(SpanLoader, "_load", fail)
    monkeypatch.setattr(RingRuntime, "prepare", lambda *_: None)  # only rings load here
    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: not failing, a)
    c = await mesh.start("c", join=await a.create_ticket())
    await until(lambda: bool(spans(a)), a)

    assert await ask(control_of(b)) == await reference()
    offers = [a.machine.profiles[node.me].memory_bytes for node in (a, b, c)]
    assert not is_memory or max(offers[:2]) < offers[2]


@pytest.mark.parametrize(
    "place", ["meshllm.node.preparation.resolve", "meshllm.node.ring.model_runtime.shape_of"]
)
async def test_a_node_that_lacks_memory_to_open_its_model_opens_it_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(ring_service, "FIRST_OPEN_S", 0.01)
    lacks = MemoryError(), OSError(errno.ENOMEM, "no memory")
    read, failing = pkgutil.resolve_name(place), [*lacks]

    def fail(*given: Any, **more: Any) -> Any:
        if failing:
            raise failing.pop()
        return read(*given, **more)

    monkeypatch.setattr(place, fail)
    a = await mesh.start("a", members=2)
    await until(lambda: a.machine.charter is not None, a)
    failing += lacks
    b = await mesh.start("b", join=await a.create_ticket())

    await until(lambda: len(spans(b)) == 2, b)


async def test_a_lost_node_is_replaced_and_can_return(mesh: Mesh) -> None:
    a = await mesh.start("a", members=2)
    ticket = await a.create_ticket()
    b = await mesh.start("b", join=ticket)
    await until(lambda: len(spans(a)) == 2, a)
    me, first = b.me, a.ring_member.plan
    text = await ask(control_of(a))

    await mesh.kill("b")
    alone = await ask(control_of(a))
    b = await mesh.start("b", join=ticket)
    await until(lambda: len(spans(a)) == 2, a)

    assert (alone, await ask(control_of(b))) == (text, text)
    assert b.me == me
    assert first is not None
    assert a.ring_member.plan is not None
    assert a.ring_member.plan.epoch > first.epoch


async def test_a_running_answer_survives_the_loss_of_a_node(mesh: Mesh) -> None:
    a = await mesh.start("a", members=2)
    await mesh.start("b", join=await a.create_ticket())
    await until(lambda: len(spans(a)) == 2, a)

    said = ""
    async with asyncio.timeout(PATIENCE_S):
        async for event in control_of(a).generate(QUESTION):
            if isinstance(event, Piece):
                if not said:
                    await mesh.kill("b")
                said += event.text

    assert said == await reference()


async def test_a_leaving_node_announces_it(mesh: Mesh) -> None:
    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: states(a).get("b") == "standby", a)

    b.leave()
    await asyncio.wait_for(b.stopped, PATIENCE_S)
    await until(lambda: states(a)["b"] == "left", a)

    assert await ask(control_of(a))
    with pytest.raises(Busy, match="is leaving the mesh"):
        await ask(control_of(b))


async def test_a_ticket_is_for_those_members_that_are_not_known(mesh: Mesh) -> None:
    a = await mesh.start("a", members=3)
    alone = a.ticket_uses
    assert a.first_model == "builtin"
    await until(lambda: a.machine.charter is not None, a)
    b = await mesh.start("b", join=await a.create_ticket())
    await b.wait_for_charter()
    assert b.first_model == "builtin"
    second = b.ticket_uses
    await until(lambda: b.me in a.machine.alive, a)
    c = await mesh.start("c", join=await a.create_ticket())
    await c.wait_for_charter()
    whole = c.ticket_uses, bool(await c.create_ticket())
    await mesh.kill("c")
    again = await mesh.start("c")

    assert (alone, second, *whole) == (2, 1, 0, True)
    assert again.ticket_uses == 0
    assert [each.is_founder for each in (a, b, c, again)] == [True, False, False, False]


async def test_a_joiner_ends_that_is_to_hold_layers_that_the_model_lacks(mesh: Mesh) -> None:
    a = await mesh.start("a")
    await until(lambda: bool(spans(a)), a)
    b = await mesh.start("b", join=await a.create_ticket(), layers=Span(2, 9))

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(UserError, match="layers `2:9` end above the 8 layers of `builtin`"):
            await b.stopped


async def test_a_joiner_whose_own_models_lack_its_layers_uses_no_ticket(mesh: Mesh) -> None:
    a = await mesh.start("a")
    ticket = await a.invite(Role.NODE, 60, 1)

    with pytest.raises(UserError, match="layers `2:9` end above the 8 layers of `builtin`"):
        await mesh.start("b", join=ticket, model="builtin", layers=Span(2, 9))

    assert a.store.invitations()[-1].guests == ()
    b = await mesh.start("b", join=ticket, model="builtin", layers=Span(2, 8))
    assert a.store.invitations()[-1].guests == (b.me,)


async def test_a_node_with_other_weights_is_refused_by_name(mesh: Mesh) -> None:
    other = mesh.folder / "other"
    shutil.copytree(resolve("builtin").folder, other)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if ".layers.3." in name)
    tensors[name] = tensors[name] + 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    a = await mesh.start("a", members=2)
    await mesh.start("b", join=await a.create_ticket(), model=str(other))
    await until(lambda: states(a).get("b") == "refused", a)

    [refused] = report_of(a).ring.refused
    assert refused.name == "b"
    assert refused.reason.startswith("its layer 3 differs from that of")
    await until(lambda: spans(a) == ["0:8"], a)


async def test_a_model_other_than_the_meshs_ends_the_node(mesh: Mesh, llama: Path) -> None:
    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket(), model=str(llama))

    with pytest.raises(ModelError, match="The mesh serves `builtin`"):
        await asyncio.wait_for(b.stopped, PATIENCE_S)


async def test_a_removed_node_is_unlinked_and_ends(mesh: Mesh) -> None:
    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: "b" in states(a), a)

    removed = await control_of(a).remove("b")

    with pytest.raises(NotAuthorised, match="is removed from the mesh"):
        await asyncio.wait_for(b.stopped, PATIENCE_S)
    assert removed.name == "b"
    assert [
        (each.is_self, each.state == "removed") for each in control_of(a).members().members
    ] == [
        (True, False),
        (False, True),
    ]


async def test_a_node_that_was_removed_while_it_was_down_reports_that_nobody_answers(
    mesh: Mesh,
) -> None:
    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: a.me in b.store.peers, b)
    await mesh.kill("b")
    await control_of(a).remove("b")

    b = await mesh.start("b")

    await until(lambda: report_of(b).ring.state is RingState.SERVING, b)
    assert (report_of(b).unanswered, report_of(a).unanswered) == (1, 0)


async def test_a_node_whose_others_have_left_expects_none(mesh: Mesh) -> None:
    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: b.me in a.store.peers, a)
    assert report_of(a).unanswered == 0

    b.leave()

    await until(lambda: states(a).get("b") == "left" and not a.machine.links, a)
    assert report_of(a).unanswered == 0


async def test_revoked_keys_reach_the_members_and_outlast_the_offer(mesh: Mesh) -> None:
    desk = await mesh.start("desk", model="builtin")
    tag = b"k" * 16
    desk.revoke((tag,))  # before the model is measured, which replaces the profile

    attic = await mesh.start("attic", join=await desk.create_ticket())
    await until(lambda: bool(spans(attic)), attic)

    assert control_of(attic).revocations() == {show(desk.me): (tag,)}
    assert control_of(desk).revocations() == {}


async def test_a_client_needs_no_model(mesh: Mesh) -> None:
    a = await mesh.start("a", members=2)
    await mesh.start("b", join=await a.create_ticket())
    await until(lambda: len(spans(a)) == 2, a)
    ticket = await a.invite(Role.CLIENT, 60, 1)

    for _ in range(2):  # the ticket is for one client, which may reconnect
        async with open_mesh_client(ticket, mesh.folder / "thin", mesh.network) as thin:
            assert await ask(thin) == await reference()

    with pytest.raises(MeshError):
        async with open_mesh_client(ticket, mesh.folder / "another", mesh.network):
            pass


async def test_a_client_is_told_the_models(mesh: Mesh) -> None:
    a = await mesh.start("a")
    control = control_of(a)
    await until(lambda: bool(spans(a)), a)

    async with open_mesh_client(
        await a.invite(Role.CLIENT, 60, 1), mesh.folder, mesh.network
    ) as thin:
        told = await thin.models()

    assert list(told) == await control.models()
    assert [each.name for each in told] == ["builtin"]


async def test_the_ticket_of_a_node_is_for_the_other_members(mesh: Mesh) -> None:
    alone = await mesh.start("a")
    three = await mesh.start("b", members=3)

    only = await mesh.start("c", members=1)

    assert (alone.ticket_uses, three.ticket_uses, only.ticket_uses) == (1, 2, 0)
    assert [
        await each.create_ticket() and each.store.invitations()[-1].uses for each in (alone, three)
    ] == [1, 2]


async def test_the_flags_of_the_latest_start_amend_the_charter(mesh: Mesh) -> None:
    a = await mesh.start("a")
    b = await mesh.start(
        "b", join=await a.create_ticket(), members=2, policy="throughput", prefer=("a",)
    )
    await until(lambda: len(spans(a)) == 2, a)

    assert a.machine.charter is not None
    assert (a.machine.charter.members, a.machine.charter.prefer) == (2, (a.me,))
    assert a.machine.charter == b.machine.charter
    assert report_of(a).ring.policy == "throughput"


async def test_only_the_founder_chooses_who_may_be_the_entry(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    a = await mesh.start("a", entry=("self",))
    b = await mesh.start("b", join=await a.create_ticket(), members=2, entry=("self",))
    await until(lambda: len(spans(a)) == 2, a)

    assert a.machine.charter is not None
    assert a.machine.charter.entries == (a.me,)
    assert a.machine.charter == b.machine.charter
    assert report_of(b).ring.entry == show(a.me)
    assert "the mesh keeps its `entries`" in caplog.text


async def test_charter_and_membership_survive_a_restart(mesh: Mesh) -> None:
    a = await mesh.start("a", members=2)
    await until(lambda: a.machine.charter is not None, a)
    before = a.mesh, a.machine.charter

    await mesh.kill("a")
    a = await mesh.start("a")

    assert (a.mesh, a.machine.charter) == before
    assert a.incarnation == 2


async def test_a_node_that_restarts_keeps_places_for_the_members_that_it_knew(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[list[tuple[str, ...]]] = []
    monkeypatch.setattr(Endpoints, "reserve", lambda _, peers: reserved.append([*peers]))
    a = await mesh.start("a", members=2)
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: b.me in a.store.peers, a)

    await mesh.kill("a")
    await mesh.start("a")

    assert reserved == [[], [], [b.endpoints.addresses]]


async def test_charter_changes_while_a_node_loads_are_kept(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await mesh.start("a")
    await until(lambda: a.machine.charter is not None, a)
    join, has_begun, may_end = Preparation.join, asyncio.Event(), asyncio.Event()

    async def read_slowly(self: Preparation, charter: Charter, **more: Any) -> ModelRuntime:
        has_begun.set()
        await may_end.wait()
        return await join(self, charter, **more)

    monkeypatch.setattr(Preparation, "join", read_slowly)
    b = await mesh.start("b", join=await a.create_ticket(), policy="throughput")
    await has_begun.wait()
    assert a.machine.charter is not None
    a.charter_editor.publish(replace(a.machine.charter, members=2))
    await until(lambda: b.machine.charter == a.machine.charter, b)
    may_end.set()
    for node in (a, b):
        await until(lambda node=node: len(spans(node)) == 2, node)  # type: ignore[misc]  # a closure

    for node in (a, b):
        assert node.machine.charter is not None
        assert (node.machine.charter.members, node.machine.charter.policy) == (2, "throughput")


class Roaming(LoopbackTransport):
    """A network on which the addresses of a listener can change."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Callable[[str], None]] = []

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        async with super().listen(address) as inner:
            moving = Moved(inner)
            self.moves.append(moving.move)
            yield moving


class Moved:
    """A listener whose addresses are set by the test."""

    def __init__(self, inner: Listener) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self.links = inner.links
        self.addresses = inner.addresses

    @property
    def address(self) -> str:
        return self.addresses[0]

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def move(self, address: str) -> None:
        self.addresses = (address, *self.addresses)
        for callback in self._callbacks:
            callback()


async def test_a_node_reads_and_writes_its_state_off_the_loop(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = note_threads(mesh.folder, monkeypatch)

    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: "b" in states(a), a)
    b.records.changed()
    for name in ("b", "a"):
        await mesh.kill(name)

    assert threads
    assert threading.get_ident() not in threads


async def test_no_timer_of_a_node_fires_after_its_end(mesh: Mesh) -> None:
    a, fired = await mesh.start("a"), list[str]()
    a.life.call_later(0.0, fired.append, "before")
    await until(lambda: fired == ["before"], a)
    a.life.call_later(0.0, fired.append, "after")

    await mesh.kill("a")
    await timers_fired()

    assert fired == ["before"]


async def test_a_change_of_address_while_profiling_is_published(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.network = network = Roaming()
    offer = Preparation.offer

    async def moving(
        self: Preparation, engine: Any, profile: Profile, *, is_further: bool
    ) -> Profile:
        network.moves[0]("loopback:elsewhere")
        return await offer(self, engine, profile, is_further=is_further)

    monkeypatch.setattr(Preparation, "offer", moving)
    a = await mesh.start("a")

    await until(lambda: spans(a) == ["0:8"], a)

    assert a.machine.profiles[a.me].addresses == ("loopback:elsewhere", "loopback:1")


async def test_a_change_of_address_is_published(mesh: Mesh) -> None:
    mesh.network = network = Roaming()
    a = await mesh.start("a")
    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: "b" in states(a), a)

    network.moves[1]("loopback:elsewhere")

    def heard() -> bool:
        return b.me in a.machine.profiles and (
            "loopback:elsewhere" in a.machine.profiles[b.me].addresses
        )

    await condition(heard)  # a change of address does not change the ring
    assert "loopback:elsewhere" in report_of(b).listening


def provided(node: MeshNode) -> dict[str, tuple[str, ...]]:
    """Return who provides which model."""
    return {each.name: tuple(sorted(each.providers)) for each in report_of(node).provided}


@pytest.mark.socket
async def test_models_of_engines_are_answered_through_every_node(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "POLL_S", 0.05)
    question = replace(QUESTION, model="fox")
    a = await mesh.start("a")
    await until(lambda: len(spans(a)) == 1, a)
    async with serving(FakeEngine()) as url, AsyncExitStack() as stack:
        second = FakeEngine()
        other = await stack.enter_async_context(serving(second))
        b = await mesh.start(
            "b", Provider(EngineClient(url)), join=await a.invite(Role.NODE, None, None)
        )
        c = await mesh.start(
            "c", Provider(EngineClient(other)), join=await a.invite(Role.NODE, None, None)
        )
        for node in (a, b, c):
            await until(lambda node=node: provided(node) == {"fox": ("b", "c")}, node)  # type: ignore[misc]  # a closure
            await until(lambda node=node: spans(node) == spans(a), node)  # type: ignore[misc]  # a closure
        seen = [report_of(node) for node in (a, b, c)]

        texts = [await ask(control_of(node), question) for node in (a, b, c)]
        second.list_status = 503
        await until(lambda: provided(a) == {"fox": ("b",)}, a)
        await ask(control_of(a), question)
        await mesh.kill("b")
        await until(lambda: not provided(a), a)

    assert texts == ["What is a ring? "] * 3
    assert [each.ring.state for each in seen] == [RingState.SERVING] * 3
    assert [[ring.state for ring in each.rings] for each in seen] == [[RingState.SERVING]] * 3
    with pytest.raises(UserError, match="A provider loads no models"):
        await c.charter_editor.serve_model(ModelOptions("another"))
    with pytest.raises(ModelError, match="No node provides `fox`"):
        await ask(control_of(a), question)
    assert await ask(control_of(a)) == await reference()
    assert states(a)["c"] == "down"


def offered(node: MeshNode) -> bool:
    """Return whether an engine serves the model of the ring, which serves too."""
    (model,) = report_of(node).models
    return bool(model.rings and model.beside)


@pytest.mark.socket
async def test_an_engine_answers_for_the_model_of_the_ring_what_the_ring_cannot_or_without_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "POLL_S", 0.05)
    engine = FakeEngine()
    a = await mesh.start("a", context=1024)
    await until(lambda: len(spans(a)) == 1, a)
    assert a.machine.charter is not None
    name = a.machine.charter.shape.name
    async with serving(engine) as url:
        provider = Provider(EngineClient(url, precision="fp32", names={name: engine.model}))
        b = await mesh.start("b", provider, join=await a.create_ticket())
        for node in (a, b):
            await until(lambda node=node: offered(node), node)  # type: ignore[misc]  # a closure

        longer = replace(QUESTION, min_context=1025)
        texts = [await ask(control_of(node), longer) for node in (a, b)]
        own = [await ask(control_of(node), QUESTION) for node in (a, b)]
        with pytest.raises(WrongField, match="with context 1024, and in fp32 by provider b "):
            await ask(control_of(b), replace(QUESTION, min_context=2049))
        await mesh.kill("a")
        await until(lambda: not report_of(b).models[0].rings, b)
        texts.append(await ask(control_of(b), QUESTION))

    assert texts == ["What is a ring? "] * 3
    assert own == [await reference()] * 2
    assert [body["model"] for body, _ in engine.asked] == [engine.model] * 3


async def test_a_prompt_reaches_no_ring_with_a_node_that_is_not_trusted(mesh: Mesh) -> None:
    a = await mesh.start("a", members=2, trust=())
    b = await mesh.start("b", join=await a.create_ticket())
    for node in (a, b):
        await until(lambda node=node: len(spans(node)) == 2, node)  # type: ignore[misc]  # a closure

    assert a.machine.charter is not None
    assert a.machine.charter.entries == (a.me,)
    for question in (QUESTION, replace(QUESTION, trusted=("a",))):
        with pytest.raises(WrongField, match="not trusted"):
            await ask(control_of(a), question)

    assert await ask(control_of(a), replace(QUESTION, trusted=("b",)))
    assert await ask(control_of(b), QUESTION)


@pytest.mark.socket
async def test_a_prompt_with_a_key_reaches_only_the_nodes_that_the_key_trusts(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(provider_module, "POLL_S", 0.05)
    engine = FakeEngine()
    a = await mesh.start("a")
    await until(lambda: len(spans(a)) == 1, a)
    async with serving(engine) as url:
        await mesh.start("b", Provider(EngineClient(url)), join=await a.create_ticket())
        await until(lambda: provided(a) == {"fox": ("b",)}, a)
        with Accounts.open(tmp_path / "keys") as accounts:
            service = Service(control_of(a), accounts)

            async def answer(name: str, *trust: str) -> str:
                key = accounts.find(accounts.create(name, KeyLimits(trust=trust), 0))
                events = service.answer(key, await service.model(key, "fox"), [QUESTION])
                return "".join([each.text async for _, each in events if isinstance(each, Piece)])

            with pytest.raises(WrongField, match="No trusted node provides `fox`"):
                await answer("home", "a")
            assert engine.asked == []
            assert await answer("away", "b") == "What is a ring? "
            assert len(engine.asked) == 1


@pytest.mark.socket
async def test_a_provider_that_leaves_finishes_its_answers(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "POLL_S", 0.05)
    engine, said = FakeEngine(), ""
    question = Request(({"role": "user", "content": "one hold two"},), model="fox")
    a = await mesh.start("a")
    async with serving(engine) as url:
        b = await mesh.start("b", Provider(EngineClient(url)), join=await a.create_ticket())
        await until(lambda: provided(a) == {"fox": ("b",)}, a)
        assert [states(each)["b"] for each in (a, b)] == ["serving"] * 2
        async with asyncio.timeout(2 * PATIENCE_S):
            async for event in control_of(a).generate(question):
                if isinstance(event, Piece) and not said:
                    b.leave()
                    await until(lambda: states(a)["b"] == "leaving", a)
                    with pytest.raises(ModelError, match="No node provides `fox`"):
                        await ask(control_of(a), question)
                    assert not b.stopped.done()
                    engine.go.set()
                said += event.text if isinstance(event, Piece) else ""

        assert said == "one hold two "
        await asyncio.wait_for(b.stopped, PATIENCE_S)
    assert len(engine.asked) == 1


async def test_no_command_or_guest_lets_the_event_loop_wait_for_the_disk(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, loop = await mesh.start("a"), threading.get_ident()
    on_loop, off_loop = list[str](), set[str]()

    def note(name: str) -> None:
        run = getattr(state_store, name)

        def noting(path: Path, *args: Any) -> Any:
            if path.parent == a.store.folder:
                on_loop.extend([name] if threading.get_ident() == loop else [])
                off_loop.add(name)
            return run(path, *args)

        monkeypatch.setattr(state_store, name, noting)

    for name in ("_stamp", "_read", "_draft"):
        note(name)

    b = await mesh.start("b", join=await a.create_ticket())
    await until(lambda: "b" in states(a), a)
    await control_of(a).invite("node", 60, 1)
    await control_of(a).remove("b")

    assert b.me in a.machine.removals
    machine = Membership(a.store.key, a._own.credential, 9, now=0, wall_s=time.time())
    restore_records(await asyncio.to_thread(StateStore.open, a.store.folder), machine, 0)
    assert b.me in machine.removals
    with pytest.raises(NotAuthorised, match="is removed from the mesh"):
        await asyncio.wait_for(b.stopped, PATIENCE_S)
    assert (on_loop, off_loop) == ([], {"_stamp", "_read", "_draft"})


async def test_a_ticket_of_another_process_is_known_by_the_next_query_of_its_guest(
    mesh: Mesh,
) -> None:
    a = await mesh.start("a")
    made = StateStore.open(a.store.folder).invite([], Role.NODE, lasts_s=None, uses=1)

    assert made.psk not in a._guests()

    await condition(lambda: made.psk in a._guests())  # as a guest repeats its query


async def test_a_ticket_of_another_process_admits_at_once(mesh: Mesh) -> None:
    a = await mesh.start("a")
    other = StateStore.open(a.store.folder)
    made = other.invite(a.endpoints.addresses, Role.NODE, lasts_s=None, uses=1)

    b = await mesh.start("b", join=made.encode())

    assert a.store.invitations()[-1].guests == (b.me,)
