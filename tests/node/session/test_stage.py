"""The driver of a stage: what it runs, what it sends on, and what it holds for whom."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from meshllm.errors import LinkLost, MeshError, ModelError
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.names import SessionId
from meshllm.node.compute.worker import Worker
from meshllm.node.session.ring_link import Neighbours
from meshllm.node.session.stage import StageNode
from meshllm.node.session.wire import opened, sealed
from meshllm.protocol.kv_cache.budget import KvBudget, KvCapacity
from meshllm.protocol.kv_cache.prefix_index import PrefixIndex
from meshllm.protocol.session.blob import session_key
from meshllm.protocol.session.messages import (
    Blob,
    Cancel,
    Close,
    Data,
    Delivered,
    Fault,
    FaultCode,
    Flags,
    Gap,
    Logits,
    Malformed,
    Resume,
)
from meshllm.protocol.session.stage import Stage
from tests.builders.session import CountedCache, CountingLayers, HeldExecutor, RecordingNeighbours

ONE, TWO, THREE = (SessionId(bytes([number] * 16)) for number in (1, 2, 3))
EPOCH = 4
PREFILL = Flags.PREFILL | Flags.NEED_ROW
GONE = LinkLost("the next rank is gone")


def rows_of(*values: float) -> Tensor:
    """Return rows [1, T, 2]."""
    return torch.tensor([[[value, value] for value in values]], dtype=torch.float32)


def data(session: SessionId, pos: int, *values: float, flags: Flags = Flags.NEED_ROW) -> Data:
    blob = sealed(session_key(session), rows_of(*values))
    return Data(session, EPOCH, 0, pos, len(values), flags, blob)


def values_of(message: object) -> list[float]:
    """Open the rows of a message."""
    assert isinstance(message, Data | Logits)
    assert message.blob is not None
    key = session_key(message.session)
    return [row[0] for row in opened(key, message.blob).flatten(0, 1).tolist()]


@dataclass
class Served:
    """A stage that runs, and what is around it."""

    node: StageNode
    task: "asyncio.Task[MeshError]"
    layers: CountingLayers
    neighbours: RecordingNeighbours
    thread: HeldExecutor
    kept: dict[SessionId, SessionCache]

    async def receive(self, *messages: Delivered) -> list[object]:
        """Deliver messages; return what the stage sends when it has nothing left to do."""
        before = len(self.neighbours.sent)
        for message in messages:
            self.neighbours.deliver(message)
        await self.thread.settle()
        return [*self.neighbours.sent[before:]]


@asynccontextmanager
async def serving(*, rank: int = 1, head: CountingLayers | None = None) -> AsyncIterator[Served]:
    """Serve as a rank of three; the layers add 1 to each row."""
    layers, neighbours, thread = (
        CountingLayers(lambda x: x + 1),
        RecordingNeighbours(),
        HeldExecutor(),
    )
    kept: dict[SessionId, SessionCache] = {}
    budget = KvBudget([KvCapacity(1 << 20, lambda tokens: (tokens, 0))])
    node = StageNode(
        Stage(rank, 3, epoch=EPOCH, context=64, index=PrefixIndex(budget)),
        cast("SpanRunner", layers),
        Worker(thread),
        cast("Neighbours", neighbours),
        kept,
        head=cast("Runner", head) if head else None,
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(node.run())
        await asyncio.sleep(0)
        yield Served(node, task, layers, neighbours, thread, kept)
        await thread.settle()
        if not task.done():
            neighbours.lose(GONE)
    assert task.cancelled() or task.result() is GONE


async def test_rows_are_run_and_sent_on() -> None:
    async with serving() as stage:
        (chunk,) = await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL))
        (step,) = await stage.receive(data(ONE, 3, 4))

        assert values_of(chunk) == [2, 3, 4]
        assert values_of(step) == [5]
        assert stage.layers.passes == [("prefill", [0]), ("step", [3])]


async def test_what_may_be_drafts_is_not_settled() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL), data(ONE, 3, 4, 5, 6))

        assert stage.node.committed == {ONE: 3}
        held = stage.node.cache_of(ONE)
        assert held is not None
        assert held.length == 6
        assert stage.node.cache_of(TWO) is None


async def test_the_last_rank_returns_one_row_of_a_chunk() -> None:
    async with serving(rank=2) as stage:
        (with_row,) = await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL))
        (without,) = await stage.receive(data(TWO, 0, 1, 2, 3, flags=Flags.PREFILL))

        assert values_of(with_row) == [4]
        assert isinstance(with_row, Data)
        assert with_row.blob is not None
        held = memoryview(with_row.blob.payload).obj.base  # type: ignore[attr-defined]
        assert held.untyped_storage().nbytes() == len(with_row.blob.payload)  # not of all rows
        assert isinstance(without, Data)
        assert without.blob is None


async def test_steps_that_wait_run_in_one_pass() -> None:
    async with serving() as stage:
        for session in (ONE, TWO):
            await stage.receive(data(session, 0, 1, flags=PREFILL))

        sent = await stage.receive(data(ONE, 1, 10), data(TWO, 1, 20, 21))

        assert stage.layers.passes[-1] == ("step", [1, 1])
        assert [values_of(message) for message in sent] == [[11], [21, 22]]
        assert stage.neighbours.groups == [2]


async def test_steps_that_fail_together_are_undone_and_run_one_by_one() -> None:
    async with serving() as stage:
        for session in (ONE, TWO):
            await stage.receive(data(session, 0, 1, flags=PREFILL))
        stage.layers.most = 1
        held = cast("CountedCache", stage.node.cache_of(TWO))
        held.croppable = False  # its states have changed

        step, gap = await stage.receive(data(ONE, 1, 10), data(TWO, 1, 20))

        assert stage.layers.passes[-2:] == [("step", [1, 1]), ("step", [1])]
        assert values_of(step) == [11]
        assert isinstance(gap, Gap)
        assert (gap.session, gap.kv_len) == (TWO, 0)


async def test_a_rejected_row_is_cropped_before_the_next_is_run() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL))

        await stage.receive(data(ONE, 1, 7))

        assert stage.layers.passes[-1] == ("step", [1])


async def test_corrupt_rows_end_their_session_and_no_other_of_the_batch() -> None:
    async with serving() as stage:
        for session in (ONE, TWO):
            await stage.receive(data(session, 0, 1, flags=PREFILL))
        strange = sealed(session_key(THREE), rows_of(1))

        sent = await stage.receive(
            Data(ONE, EPOCH, 0, 1, 1, Flags.NEED_ROW, strange), data(TWO, 1, 20)
        )

        (fault,) = (message for message in sent if isinstance(message, Fault))
        assert (fault.session, fault.code) == (ONE, FaultCode.INTEGRITY)
        assert [values_of(message) for message in sent if isinstance(message, Data)] == [[21]]
        assert stage.node.sessions == 1


@pytest.mark.parametrize(
    "blob",
    [
        None,
        sealed(session_key(ONE), rows_of(1, 2)),
        sealed(session_key(ONE), rows_of(1)[:, :, :1]),
        sealed(session_key(ONE), rows_of(1).half()),
    ],
)
async def test_invalid_rows_end_their_session_and_no_other(blob: Blob | None) -> None:
    async with serving() as stage:
        for session in (ONE, TWO):
            await stage.receive(data(session, 0, 1, flags=PREFILL))

        (fault,) = await stage.receive(Data(ONE, EPOCH, 0, 1, 1, Flags.NEED_ROW, blob))
        (step,) = await stage.receive(data(TWO, 1, 20))

        assert isinstance(fault, Fault)
        assert (fault.session, fault.code) == (ONE, FaultCode.RULES)
        assert "The previous rank sent" in fault.text
        assert stage.neighbours.blamed == 1
        assert values_of(step) == [21]


async def test_an_invalid_message_ends_its_session_and_no_other() -> None:
    async with serving() as stage:
        for session in (ONE, TWO):
            await stage.receive(data(session, 0, 1, flags=PREFILL))

        (fault,) = await stage.receive(Malformed(ONE, EPOCH, "Blob of unknown dtype 99"))
        (step,) = await stage.receive(data(TWO, 1, 20))

        assert isinstance(fault, Fault)
        assert (fault.session, fault.code) == (ONE, FaultCode.RULES)
        assert fault.text == "The previous rank sent an invalid message: Blob of unknown dtype 99"
        assert stage.node.sessions == 1
        assert values_of(step) == [21]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("no such operation"), FaultCode.MODEL),
        (RuntimeError("cannot allocate memory"), FaultCode.BUSY),
        (ZeroDivisionError("a bug"), FaultCode.MODEL),
    ],
)
async def test_an_error_in_the_layers_is_reported_to_the_entry(
    error: Exception, code: FaultCode
) -> None:
    async with serving() as stage:
        stage.layers.error = error

        (fault,) = await stage.receive(data(ONE, 0, 1, flags=PREFILL))

        assert isinstance(fault, Fault)
        assert (fault.code, fault.text, fault.rank) == (code, str(error), 1)
        assert stage.neighbours.blamed == 0
        assert stage.node.sessions == 0


async def test_a_cache_that_cannot_be_cropped_is_a_gap() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, flags=PREFILL))
        stage.node._sessions[ONE].cache.crop(0)  # as if the model could not roll it back

        (gap,) = await stage.receive(data(ONE, 2, 3))

        assert gap == Gap(ONE, EPOCH, 0, 0)


async def test_what_a_close_keeps_is_adopted_by_a_resume() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL))

        await stage.receive(Close(ONE, EPOCH, keep=3))
        assert [*stage.kept] == [ONE]
        await stage.receive(Resume(TWO, EPOCH, ONE, 2, whole=False), data(TWO, 2, 9))
        await stage.receive(Resume(THREE, EPOCH, ONE, 2, whole=True), data(THREE, 2, 9))

        assert stage.layers.passes[-2:] == [("step", [2]), ("step", [2])]
        assert stage.kept == {}
        assert stage.node.sessions == 2


async def test_a_step_waits_for_the_cache_that_its_session_adopts() -> None:
    async with serving() as stage:
        for session in (ONE, THREE):
            await stage.receive(data(session, 0, 1, 2, flags=PREFILL))
        await stage.receive(Close(ONE, EPOCH, keep=2))

        *_, step = await stage.receive(
            data(THREE, 2, 3), Resume(TWO, EPOCH, ONE, 2, whole=True), data(TWO, 2, 9)
        )

        assert values_of(step) == [10]


@pytest.mark.parametrize("whole", [True, False])
async def test_changes_that_wait_when_the_ring_is_lost_are_made(*, whole: bool) -> None:
    async with serving() as stage:
        for session in (ONE, THREE):
            await stage.receive(data(session, 0, 1, 2, flags=PREFILL))
        await stage.receive(Close(ONE, EPOCH, keep=2))

        stage.neighbours.deliver(Resume(TWO, EPOCH, ONE, 2, whole=whole))
        stage.neighbours.deliver(Close(THREE, EPOCH, keep=2))
        stage.task.cancel()
        await asyncio.wait([stage.task])

        lengths = {session: cache.length for session, cache in stage.kept.items()}
        assert lengths == {TWO: 2, THREE: 2, **({} if whole else {ONE: 2})}
        await stage.thread.settle()  # what waited finds nothing to do
        assert {session: cache.length for session, cache in stage.kept.items()} == lengths


async def test_rows_of_a_session_that_ends_before_they_begin_are_not_computed() -> None:
    async with serving() as stage:
        rows, close = data(ONE, 0, 1, 2, 3, flags=PREFILL), Close(ONE, EPOCH)
        (sent,) = await stage.receive(rows, close)

        assert isinstance(sent, Close)
        assert stage.layers.passes == []
        assert stage.node.waiting_bytes == 0
        assert len(await stage.receive(data(TWO, 0, 1, flags=PREFILL))) == 1


async def test_a_step_of_a_later_gen_replaces_one_that_has_not_begun() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL))
        wrong, right = data(ONE, 3, 7), replace(data(ONE, 3, 4), gen=1)
        cancel, step = await stage.receive(wrong, Cancel(ONE, EPOCH, 1), right)

        assert isinstance(cancel, Cancel)
        assert values_of(step) == [5]
        assert stage.layers.passes == [("prefill", [0]), ("step", [3])]


async def test_a_close_that_keeps_nothing_frees_the_cache() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, flags=PREFILL))

        (close,) = await stage.receive(Close(ONE, EPOCH))

        assert isinstance(close, Close)
        assert len(close.tallies) == 1
        assert stage.node.sessions == 0
        assert stage.kept == {}


async def test_a_copy_without_memory_costs_only_the_prefix() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL))
        await stage.receive(Close(ONE, EPOCH, keep=3))
        cast("CountedCache", stage.kept[ONE]).branches = False

        _, gap = await stage.receive(Resume(TWO, EPOCH, ONE, 2, whole=False), data(TWO, 2, 9))

        assert gap == Gap(TWO, EPOCH, 0, 0)
        assert [*stage.kept] == [ONE]


@pytest.mark.parametrize("error", [AttributeError("a bug in model code"), EOFError()], ids=repr)
async def test_model_code_that_cannot_copy_costs_only_the_prefix(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, 3, flags=PREFILL))
        await stage.receive(Close(ONE, EPOCH, keep=3))
        monkeypatch.setattr(CountedCache, "branch", fail)

        _, gap = await stage.receive(Resume(TWO, EPOCH, ONE, 2, whole=False), data(TWO, 2, 9))

    assert gap == Gap(TWO, EPOCH, 0, 0)
    assert "cannot copy a cache" in caplog.text


HELP = Flags.NEED_ROW | Flags.HELP


def half_head() -> CountingLayers:
    """Return a part of the LM head, without a cache: the logits are the row, doubled."""

    class Head(CountingLayers):
        def step(self, x: Tensor, _cache: object) -> Tensor:
            if self.error:
                raise self.error
            return torch.cat([2 * x] * 128, -1)

    return Head(lambda x: x)


async def test_logits_follow_the_row_that_asks_for_them() -> None:
    async with serving(rank=2, head=half_head()) as stage:
        await stage.receive(data(ONE, 0, 1, flags=PREFILL))

        row, logits = await stage.receive(data(ONE, 1, 5, flags=HELP))
        (unasked,) = await stage.receive(data(ONE, 2, 6))

        assert values_of(row) == [6]
        assert isinstance(logits, Logits)
        assert (logits.pos, values_of(logits)[0]) == (1, 12)
        assert isinstance(unasked, Data)


async def test_logits_that_would_delay_rows_are_not_sent() -> None:
    async with serving(rank=2, head=half_head()) as stage:
        await stage.receive(data(ONE, 0, 1, flags=PREFILL))
        stage.neighbours.is_waiting = True

        sent = await stage.receive(data(ONE, 1, 5, flags=HELP))

        assert [type(message) for message in sent] == [Data]


async def test_an_error_in_the_head_costs_only_the_logits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = half_head()
    head.error = ModelError("no head")
    async with serving(rank=2, head=head) as stage:
        await stage.receive(data(ONE, 0, 1, flags=PREFILL))

        with caplog.at_level(logging.WARNING):
            sent = await stage.receive(data(ONE, 1, 5, flags=HELP))

        assert [type(message) for message in sent] == [Data]
        assert "no logits for the entry: no head" in caplog.text


async def test_the_sessions_of_a_lost_ring_are_kept_for_the_next() -> None:
    async with serving() as stage:
        await stage.receive(data(ONE, 0, 1, 2, flags=PREFILL))
        await stage.receive(data(TWO, 0, 1, flags=PREFILL))

        stage.neighbours.lose(GONE)
        for _ in range(10):
            await asyncio.sleep(0)

        assert {session: cache.length for session, cache in stage.kept.items()} == {ONE: 2, TWO: 1}
        assert stage.node.sessions == 0


async def test_rows_that_wait_for_a_step_or_to_be_sent_are_counted() -> None:
    chunk = data(ONE, 0, 1, 2, 3, flags=PREFILL)
    assert chunk.blob is not None
    async with serving() as stage:
        stage.neighbours.deliver(chunk)
        stage.neighbours.queued_bytes = 5
        waiting = stage.node.waiting_bytes
        await stage.thread.settle()

        assert waiting == len(chunk.blob.payload) + 5
        assert stage.node.waiting_bytes == 5
