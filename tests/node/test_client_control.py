"""What an API server learns from a client of a mesh, which a stand-in is here."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from meshllm.errors import TimedOut, UserError
from meshllm.names import LossCause, MeshId, NodeId, show
from meshllm.node.client import MeshClient
from meshllm.node.client_control import GLANCE_S, ClientControl
from meshllm.node.requests.counts import RequestCounters
from meshllm.request import Event, Request
from meshllm.status import LossCounts, Measured, MeshStatus, ModelStatus, PlanTerms, RingState
from meshllm.testing.clock import run_virtual
from tests.builders.fake_node import FOX
from tests.builders.fake_ring import answer_of

ME, MESH = NodeId(b"m" * 32), MeshId(b"h" * 32)
RING = ModelStatus("builtin", 8, 256, "bfloat16", "none", 2048, key="ab", epoch=3)
ANSWER = answer_of("a ring", 2)


@dataclass
class _Router:
    counts: RequestCounters = field(default_factory=RequestCounters)


@dataclass
class Thin:
    """A client that was told some models, or an error, after a while."""

    told: Sequence[ModelStatus] | Exception = (RING, FOX)
    takes_s: float = 0.0
    me: NodeId = ME
    mesh: MeshId = MESH
    waiting: int = 0
    router: _Router = field(default_factory=_Router)

    async def models(self) -> Sequence[ModelStatus]:
        await asyncio.sleep(self.takes_s)
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    def reason(self) -> str:
        return "no node of the mesh answers"

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        assert request == Request(raw="what?")
        yield ANSWER


def control(**fields: Any) -> ClientControl:
    return ClientControl(cast("MeshClient", Thin(**fields)))


def status(**fields: Any) -> MeshStatus:
    return run_virtual(control(**fields).status())


async def test_models_and_answers_are_those_of_the_client() -> None:
    node = control()

    assert await node.models() == (RING, FOX)
    assert [event async for event in node.generate(Request(raw="what?"))] == [ANSWER]


def test_the_status_tells_models_and_no_nodes() -> None:
    seen = status()

    assert (seen.is_client, seen.mesh, seen.node) == (True, MESH.hex(), show(ME))
    assert (seen.model, seen.models, seen.provided) == (RING, (RING,), (FOX,))
    assert (seen.nodes, seen.rings, seen.ring.stages, seen.listening) == ((), (), (), ())
    assert (seen.ring.state, seen.ring.epoch, seen.ring.reason) == (RingState.SERVING, 3, "")


@pytest.mark.parametrize(
    ("told", "state", "reason"),
    [
        ((), RingState.WAITING, "the mesh serves no model yet"),
        ((replace(RING, epoch=0),), RingState.FORMING, "the mesh serves no model yet"),
        ((FOX,), RingState.SERVING, ""),
        (TimedOut("unknown"), RingState.WAITING, "unknown"),
    ],
    ids=["none", "forming", "provided", "unknown"],
)
def test_the_state_is_that_of_the_models(
    told: Sequence[ModelStatus] | Exception, state: RingState, reason: str
) -> None:
    seen = status(told=told).ring

    assert (seen.state, seen.reason) == (state, reason)


def test_a_status_does_not_wait_for_a_mesh_that_is_away() -> None:
    async def glance() -> tuple[MeshStatus, float]:
        seen = await control(takes_s=100).status()
        return seen, asyncio.get_running_loop().time()

    seen, took_s = run_virtual(glance())

    assert took_s == GLANCE_S
    assert (seen.ring.state, seen.models) == (RingState.WAITING, ())
    assert seen.ring.reason == "no node of the mesh answers"


def test_the_requests_of_the_api_server_are_counted() -> None:
    losses = {LossCause.LINK_LOST: LossCounts(LossCause.LINK_LOST, 2, 1.23456, 40)}
    last = replace(ANSWER, ms_per_token=5.0, ttft_ms=50.0)
    counts = RequestCounters(2, 3, 4, 50, losses, last, last_tokens=7)

    seen = status(router=_Router(counts), waiting=1)

    sessions = seen.sessions
    assert (sessions.active, sessions.waiting) == (3, 1)
    assert (sessions.served, sessions.failed, sessions.tokens) == (3, 4, 50)
    assert sessions.losses == (LossCounts(LossCause.LINK_LOST, 2, 1.235, 40),)
    assert seen.ring.measured == Measured(5.0, 50.0, 7, ())


@pytest.mark.parametrize("last", [None, replace(ANSWER, ms_per_token=0.0)])
def test_without_a_measured_answer_there_is_no_speed(last: Any) -> None:
    assert status(router=_Router(RequestCounters(last=last))).ring.measured is None


async def test_a_client_plans_nothing_and_tells_nobody_of_its_keys() -> None:
    node = control()

    with pytest.raises(UserError, match="knows no nodes to plan with"):
        await node.try_plan(PlanTerms())
    await node.revoke((b"tag",))
