import asyncio
import os
import sys
from dataclasses import replace

import pytest

from meshllm.cli.ring import watch
from meshllm.cli.shared.client import NodeClient
from meshllm.errors import LinkLost
from meshllm.status import MemoryStatus, MeshStatus, PastState
from tests.builders.fake_client import FakeClient
from tests.builders.status import RINGS, status_of, waiting, with_link, with_node, with_ring


async def test_a_watch_ends_when_nobody_reads_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeClient(monkeypatch)
    node.statuses = [status_of(2)]
    monkeypatch.setattr(watch, "REFRESH_S", 0.0)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        os.close(reader)
        with pytest.raises(SystemExit) as raised:
            await watch.follow(client(node), lambda _: None, print)

    assert raised.value.code == 141


async def test_an_event_causes_an_early_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeClient(monkeypatch)
    node.statuses = [waiting("alone"), status_of(2)]
    monkeypatch.setattr(watch, "REFRESH_S", 3600)
    seen: list[str] = []
    both = asyncio.Event()

    def show(status: MeshStatus) -> None:
        seen.append(status.ring.state)
        if len(seen) == 2:
            both.set()

    watching = asyncio.create_task(watch.follow(client(node), show, print))
    await both.wait()
    watching.cancel()

    assert seen == ["waiting", "serving"]


async def test_a_node_that_restarts_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node, gone = FakeClient(monkeypatch), LinkLost("The node is gone")
    node.statuses = [status_of(1), gone, gone, status_of(2), status_of(3)]
    monkeypatch.setattr(watch, "REFRESH_S", 0.01)
    told: list[str] = []
    back = asyncio.Event()

    def show(status: MeshStatus) -> None:
        told.append(f"{len(status.nodes)} nodes")
        if len(status.nodes) == 3:
            back.set()

    watching = asyncio.create_task(watch.follow(client(node), show, told.append))
    await back.wait()
    watching.cancel()

    assert told == ["1 nodes", "The node is gone; waiting for the node to return", "3 nodes"]


async def test_a_cancellation_while_the_node_is_lost_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(FakeClient):
        async def status(self) -> MeshStatus:
            status = await super().status()
            if seen:
                watching.cancel()
                raise LinkLost("The node is gone")
            return status

    seen: list[MeshStatus] = []
    node = Interrupted(monkeypatch)
    watching = asyncio.create_task(watch.follow(client(node), seen.append, pytest.fail))

    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_without_a_node_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeClient(monkeypatch)
    node.statuses = [LinkLost("No node is running")]

    with pytest.raises(LinkLost):
        await watch.follow(client(node), print, print)


def test_clocks_and_counters_are_no_change() -> None:
    seen: list[MeshStatus] = []
    show = watch.changes(seen.append)
    first = _of_rings(status_of(2), 1.0)
    second = with_link(_of_rings(status_of(2), 2.0), 1, heard_s=9, bytes_sent=1)
    second = replace(second, since_s=755.0, memory=MemoryStatus(process=1, requests=1, other=1))
    third = with_node(first, 1, link=None)
    fourth = replace(third, memory=MemoryStatus(weights=1))

    for status in (first, second, third, fourth):
        show(status)

    assert seen == [first, third, fourth]


def _of_rings(status: MeshStatus, ago_s: float) -> MeshStatus:
    status = with_ring(status, history=(PastState("serving", ago_s),))
    return replace(status, rings=(replace(RINGS[0], status=status.ring), RINGS[1]))


def client(node: FakeClient) -> NodeClient:
    return node  # type: ignore[return-value]  # implements what is used
