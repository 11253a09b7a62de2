import asyncio

import pytest

from meshllm.errors import Busy, LinkLost
from meshllm.names import SessionId
from meshllm.node.admission_queue import AdmissionQueue
from meshllm.protocol.kv_cache.admission import Admission
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from tests.builders.rooms import room

A, B, C = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


class Line:
    """A queue for one place, and who has held it."""

    def __init__(self) -> None:
        self.queue = AdmissionQueue(Admission(KvBudget([]), 1, 2))
        self.held: list[SessionId] = []
        self.go = asyncio.Event()

    def ask(self, session: SessionId, requester: str | None = None) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._hold(session, requester))

    async def _hold(self, session: SessionId, requester: str | None) -> None:
        async with self.queue.admitted(session, 1, requester):
            self.held.append(session)
            await self.go.wait()


async def ended(*tasks: asyncio.Task[None]) -> list[BaseException | None]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_asks_after_a_cache_was_released_lets_in_those_before_it() -> None:
    budget, begun = KvBudget([room(4)]), list[SessionId]()
    queue = AdmissionQueue(Admission(budget, 8))
    released, closed = asyncio.Event(), asyncio.Event()

    async def hold(session: SessionId, blocks: int) -> None:
        async with queue.admitted(session, blocks * BLOCK, None):
            begun.append(session)
            await released.wait()
            budget.release(session)  # a prefix is kept before its last event is delivered
            await closed.wait()

    first, second = asyncio.ensure_future(hold(A, 3)), asyncio.ensure_future(hold(B, 3))
    await asyncio.sleep(0)
    assert begun == [A]

    released.set()
    await asyncio.sleep(0)
    third = asyncio.ensure_future(hold(C, 1))
    for _ in range(3):
        await asyncio.sleep(0)

    assert sorted(begun) == [A, B, C]
    closed.set()
    await asyncio.gather(first, second, third)


async def test_the_owner_waits_before_others() -> None:
    line = Line()
    tasks = line.ask(A, "key"), line.ask(B, "key"), line.ask(C)
    await asyncio.sleep(0)
    assert line.held == [A]

    line.go.set()
    await ended(*tasks)

    assert line.held == [A, C, B]


async def test_who_is_cancelled_while_waiting_leaves_the_queue() -> None:
    line = Line()
    first, second, third = line.ask(A), line.ask(B), line.ask(C)
    await asyncio.sleep(0)

    second.cancel()
    await ended(second)
    line.go.set()
    await ended(first, third)

    assert line.held == [A, C]
    assert not line.queue._waiting


async def test_who_is_let_in_and_cancelled_at_once_passes_the_place_on() -> None:
    line = Line()
    first, second, third = line.ask(A), line.ask(B), line.ask(C)
    await asyncio.sleep(0)

    first.cancel()
    second.cancel()
    line.go.set()
    await ended(first, second, third)

    assert line.held == [A, C]


async def test_a_full_queue_refuses() -> None:
    line = Line()
    tasks = [line.ask(each) for each in (A, B, C)]
    await asyncio.sleep(0)

    with pytest.raises(Busy, match="2 are waiting"):
        await line.ask(SessionId(b"d" * 16))

    line.go.set()
    assert await ended(*tasks) == [None] * 3


async def test_an_end_reaches_all_that_wait() -> None:
    line, lost = Line(), LinkLost("gone")
    first, second, third = line.ask(A), line.ask(B), line.ask(C)
    await asyncio.sleep(0)

    second.cancel()
    line.queue.end(lost)
    line.go.set()

    assert (await ended(first, third))[1] is lost
    assert line.held == [A]


async def test_more_room_lets_in_who_waits_for_it() -> None:
    begun = list[SessionId]()
    queue = AdmissionQueue(Admission(KvBudget([room(4)]), 8))

    async def hold(session: SessionId) -> None:
        async with queue.admitted(session, 3 * BLOCK, None):
            begun.append(session)

    async with queue.admitted(A, 3 * BLOCK, None):
        second = asyncio.ensure_future(hold(B))
        await asyncio.sleep(0)
        assert not queue.resize([2 * BLOCK])
        assert begun == []
        assert queue.resize([6 * BLOCK])
        await second

    assert begun == [B]


async def test_who_asks_for_more_is_called_when_there_is_room() -> None:
    queue, grown = AdmissionQueue(Admission(KvBudget([room(4)]), 8)), list[SessionId]()

    async with queue.admitted(A, 3 * BLOCK, None):
        async with queue.admitted(B, BLOCK, None):
            queue.grow(A, 4 * BLOCK, lambda: grown.append(A))
            queue.grow(B, BLOCK, lambda: grown.append(B))
            assert grown == [B]
        assert grown == [B, A]
