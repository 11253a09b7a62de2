"""The driver of an entry: generations from admission to their end, alone and in a ring."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from meshllm.errors import Busy, LinkLost, MeshError, ModelError, PeerFault
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.model.wire.payload import RowFormat
from meshllm.names import NodeId, SessionId, Span
from meshllm.node.compute.worker import Worker
from meshllm.node.session.entry import EntryConfig, EntryNode
from meshllm.node.session.generation import Ended, EntryRunners, GenerationRequest, Output, Token
from meshllm.node.session.ring_link import Neighbours
from meshllm.node.session.wire import opened, sealed
from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.drafting.window import StepTimes
from meshllm.protocol.kv_cache.admission import QUANTUM, SHORT_ANSWER
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget, KvCapacity
from meshllm.protocol.kv_cache.prefix_index import RESUME_S, PrefixIndex
from meshllm.protocol.kv_cache.prefix_matching import MIN_SHARED, PrefixCache
from meshllm.protocol.session.actions import Embed, Emit
from meshllm.protocol.session.blob import session_key
from meshllm.protocol.session.messages import (
    Blob,
    Close,
    Data,
    Delivered,
    Fault,
    FaultCode,
    Flags,
    Gap,
    JobTimes,
    Malformed,
    RankStats,
    Resume,
    SessionMessage,
)
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.speculation import Speculation
from meshllm.request import FinishReason, Prefilled, Resumable, Sampling, Waiting
from tests.builders.session import (
    CountedCache,
    CountingLayers,
    HeldExecutor,
    RecordingNeighbours,
    next_token,
)

EPOCH = 4
CONTEXT = 400
GONE = LinkLost("the next rank is gone")
TALLY = RankStats(JobTimes(1000, 0, 0), 1, 100, 50)
LONG = tuple(range(MIN_SHARED + 4))


def order(*prompt: int, tokens: int | None = 3, given: tuple[int, ...] = ()) -> GenerationRequest:
    """Ask for the next tokens: each is its predecessor plus one."""
    return GenerationRequest(prompt or (1, 2), Sampling(), tokens, lambda _: False, given=given)


class StepHead:
    """The LM head of a larger ring, whose hidden states are the tokens."""

    def step_many(self, rows: list[Tensor], _caches: list[None]) -> list[Tensor]:
        return [next_token(row[..., 0].long()) for row in rows]


def travelled(message: SessionMessage) -> SessionMessage:
    """Return what a last rank without layers makes of a message."""
    match message:
        case Close():
            return replace(message, tallies=(TALLY,))
        case Data(flags=flags) if not flags & Flags.NEED_ROW:
            return replace(message, blob=None)
        case Data(session=session, flags=flags, blob=Blob() as blob) if flags & Flags.PREFILL:
            key = session_key(session)
            return replace(message, blob=sealed(key, opened(key, blob)[:, -1:]))
        case _:
            return message


@dataclass
class Running:
    """An entry that runs, and what is around it."""

    node: EntryNode
    task: "asyncio.Task[MeshError]"
    layers: CountingLayers
    thread: HeldExecutor
    neighbours: RecordingNeighbours | None
    answer: Callable[[SessionMessage], Delivered]
    """What comes back of a message that was sent round the ring."""

    async def read(self, outputs: AsyncGenerator[Output, None], count: int = 100) -> list[Output]:
        """Read up to ``count`` outputs, computing and passing messages round the ring."""
        read = list[Output]()
        while len(read) < count:
            step = asyncio.ensure_future(anext(outputs, None))
            output = await self.drive(step)
            if output is None:
                break
            read.append(output)
        return read

    async def drive(self, task: "asyncio.Future[Output | None]") -> Output | None:
        for _ in range(1000):
            await self.settle()
            if task.done():
                return task.result()
        raise AssertionError("the entry waits for something that does not come")

    async def settle(self) -> None:
        """Compute what is to be computed, and return what was sent, as the other ranks would."""
        await self.thread.settle()
        if self.neighbours:
            sent, self.neighbours.sent = self.neighbours.sent, []
            for message in sent:
                self.neighbours.deliver(self.answer(message))
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    *,
    ring: int = 1,
    sessions: int = 2,
    blocks: int = 8,
    keeps: bool = False,
    resumes: bool = False,
    context: int = CONTEXT,
    prompt_bytes: int | None = None,
) -> AsyncIterator[Running]:
    """Run an entry of a ring of one or two, with room for so many blocks of tokens."""
    thread = HeldExecutor()
    neighbours = RecordingNeighbours() if ring > 1 else None
    hidden: Callable[[Tensor], Tensor] = lambda tokens: tokens[..., None].float()  # noqa: E731
    form = RowFormat(1, torch.float32)
    layers = CountingLayers(hidden if ring > 1 else next_token, row_format=form)
    rooms = [KvCapacity(blocks * BLOCK, lambda tokens: (tokens, 0))] * ring
    index = PrefixIndex(KvBudget(rooms), None if keeps else 0, resumes=resumes)
    head = cast("Runner", StepHead()) if ring > 1 else None
    node = EntryNode(
        EntryRunners(cast("SpanRunner", layers), head, context),
        EntryConfig(
            ring=ring,
            epoch=EPOCH,
            pace=lambda _tokens, _others: PrefillPacing(chunk=4),
            max_sessions=sessions,
            max_crop=None,
            prefixes=PrefixCache[SessionCache](index, None),
            prompt_bytes=prompt_bytes,
        ),
        Worker(thread),
        cast("Neighbours", neighbours) if neighbours else None,
    )
    task = asyncio.create_task(node.run())
    await asyncio.sleep(0)
    try:
        yield Running(node, task, layers, thread, neighbours, travelled)
    finally:
        await thread.settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ids(outputs: list[Output]) -> list[int]:
    return [output.id for output in outputs if isinstance(output, Token)]


@pytest.mark.parametrize("ring", [1, 2])
async def test_a_generation_yields_progress_tokens_and_its_end(ring: int) -> None:
    async with running(ring=ring) as entry:
        outputs = await entry.read(entry.node.generate(order(5, 6, 7, 8, 9, tokens=3)))

        assert [each.done for each in outputs if isinstance(each, Prefilled)] == [4, 5]
        assert ids(outputs) == [10, 11, 12]
        assert isinstance(outputs[-1], Ended)
        assert outputs[-1].reason is FinishReason.LENGTH
        assert entry.node.sessions == 0


async def test_a_job_is_the_last_action() -> None:
    async with running() as entry:
        reading = asyncio.ensure_future(anext(entry.node.generate(order())))
        await asyncio.sleep(0)
        (session,) = entry.node._sessions

        with pytest.raises(AssertionError):
            entry.node._act(session, [Embed(0, 1, (7,)), Emit(7)])

        reading.cancel()


async def test_the_tallies_of_all_ranks_are_measured() -> None:
    async with running(ring=2) as entry:
        *_, ended = await entry.read(entry.node.generate(order()))

        assert isinstance(ended, Ended)
        assert len(ended.measured.hops) == 2
        assert ended.measured.hops[1].compute_s == 0.001


async def test_the_last_token_ends_the_answer() -> None:
    async with running() as entry:
        stops = replace(order(tokens=9), take_token=lambda token: token == 4)

        outputs = await entry.read(entry.node.generate(stops))

        assert ids(outputs) == [3, 4]
        assert isinstance(outputs[-1], Ended)
        assert outputs[-1].reason is FinishReason.STOP


async def test_given_tokens_are_computed_as_steps_and_count_as_answer() -> None:
    async with running() as entry:
        outputs = await entry.read(entry.node.generate(order(1, 2, tokens=4, given=(3, 4))))

        assert ids(outputs) == [5, 6]
        assert entry.layers.passes == [
            ("prefill", [0]),
            *(("step", [length]) for length in (2, 3, 4)),
        ]


async def test_a_generation_waits_until_another_has_left() -> None:
    async with running(sessions=1) as entry:
        first, second = entry.node.generate(order()), entry.node.generate(order(7, 8))
        await entry.read(first, 1)
        waiting = asyncio.ensure_future(anext(second))
        await entry.settle()
        assert not waiting.done()

        await entry.read(first)
        await entry.drive(cast("asyncio.Future[Output | None]", waiting))
        rest = await entry.read(second)

        assert ids(rest) == [9, 10, 11]


@pytest.mark.parametrize("who", [{"requester": NodeId(b"o" * 32)}, {"scope": "a key"}])
async def test_the_owner_does_not_wait_behind_the_requests_of_others(who: dict[str, Any]) -> None:
    async with running(sessions=1) as entry:
        first = entry.node.generate(order())
        await entry.read(first, 1)
        other = replace(order(7, 8), **who)
        theirs = asyncio.ensure_future(anext(entry.node.generate(other)))
        await entry.settle()
        own = entry.node.generate(order(7, 8))
        ours = asyncio.ensure_future(anext(own))
        await entry.settle()

        await entry.read(first)
        await entry.drive(cast("asyncio.Future[Output | None]", ours))

        assert ours.done()
        assert not theirs.done()
        await entry.read(own)
        await entry.drive(cast("asyncio.Future[Output | None]", theirs))


async def test_keys_of_another_node_take_turns() -> None:
    async with running(sessions=1) as entry:
        first = entry.node.generate(order())
        await entry.read(first, 1)
        one = replace(order(7, 8, tokens=300), take_token=lambda token: token > 9)
        burst = replace(one, requester=NodeId(b"o" * 32), scope="a key")
        many = [entry.node.generate(burst) for _ in range(2)]
        waiting = [asyncio.ensure_future(anext(each)) for each in many]
        await entry.settle()
        other = entry.node.generate(replace(burst, scope="another key"))
        theirs = asyncio.ensure_future(anext(other))
        await entry.settle()

        await entry.read(first)
        await entry.drive(cast("asyncio.Future[Output | None]", waiting[0]))
        await entry.read(many[0])
        await entry.drive(cast("asyncio.Future[Output | None]", theirs))

        assert theirs.done()
        assert not waiting[1].done()
        await entry.read(other)
        await entry.drive(cast("asyncio.Future[Output | None]", waiting[1]))
        await entry.read(many[1])


async def test_a_waiting_generation_that_is_cancelled_leaves_the_queue() -> None:
    async with running(sessions=1) as entry:
        first = entry.node.generate(order())
        await entry.read(first, 1)
        waiting = asyncio.ensure_future(anext(entry.node.generate(order())))
        await entry.settle()

        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await entry.read(first)
        outputs = await entry.read(entry.node.generate(order()))

        assert ids(outputs) == [3, 4, 5]


async def test_who_asks_while_an_answer_is_delivered_lets_in_those_before_it() -> None:
    async with running(ring=2, sessions=8, blocks=3, keeps=True) as entry:
        most = order(*LONG, tokens=CONTEXT)  # takes two of the three blocks
        first = entry.node.generate(replace(most, take_token=lambda token: token > len(LONG) + 9))
        await entry.read(first, 1)
        waiting = asyncio.ensure_future(anext(entry.node.generate(most)))
        await entry.settle()
        assert not waiting.done()
        while not isinstance((await entry.read(first, 1))[0], Ended):
            pass

        third = asyncio.ensure_future(anext(entry.node.generate(most)))
        await entry.settle()
        await entry.read(first)  # the first leaves

        await entry.drive(cast("asyncio.Future[Output | None]", waiting))
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)


async def test_an_error_of_the_layers_ends_its_generation_with_that_error() -> None:
    async with running() as entry:
        entry.layers.error = error = ModelError("no such operation")

        with pytest.raises(ModelError) as caught:
            await entry.read(entry.node.generate(order()))

        assert caught.value is error
        entry.layers.error = None
        assert ids(await entry.read(entry.node.generate(order()))) == [3, 4, 5]


async def test_a_fault_of_another_rank_is_raised() -> None:
    async with running(ring=2) as entry:

        def fail(message: SessionMessage) -> SessionMessage:
            if isinstance(message, Data):
                return Fault(message.session, EPOCH, FaultCode.BUSY, 1, "no room")
            return travelled(message)

        entry.answer = fail

        with pytest.raises(Busy, match="no room"):
            await entry.read(entry.node.generate(order()))


async def test_closing_the_iterator_ends_the_session_on_every_rank() -> None:
    async with running(ring=2) as entry:
        sent = list[SessionMessage]()

        def note(message: SessionMessage) -> SessionMessage:
            sent.append(message)
            return travelled(message)

        entry.answer = note
        outputs = entry.node.generate(order(tokens=50))
        await entry.read(outputs, 3)
        steps = sum(isinstance(message, Data) for message in sent)

        closing = asyncio.ensure_future(outputs.aclose())
        while not closing.done():
            await entry.settle()

        assert sum(isinstance(message, Close) for message in sent) == 1
        assert sum(isinstance(message, Data) for message in sent) <= steps + 1
        assert entry.node.sessions == 0


@pytest.mark.parametrize("ran", [0, 1], ids=["chunk", "step"])
async def test_what_waits_for_an_ended_generation_is_not_computed(ran: int) -> None:
    async with running(keeps=True) as entry:
        outputs = entry.node.generate(order())
        reading = asyncio.ensure_future(anext(outputs))
        for _ in range(ran):
            await asyncio.sleep(0)
            await entry.thread.run_one()
        await asyncio.sleep(0)
        assert entry.thread.waiting == 1  # its cache may be another's before this runs

        reading.cancel()
        await asyncio.wait([reading])
        await outputs.aclose()
        await entry.thread.settle()

        assert len(entry.layers.passes) == ran


async def test_a_lost_ring_ends_running_and_waiting_generations_and_refuses_others() -> None:
    async with running(ring=2, sessions=1) as entry:
        first = entry.node.generate(order())
        await entry.read(first, 1)
        waiting = asyncio.ensure_future(anext(entry.node.generate(order())))
        await entry.settle()
        assert entry.neighbours is not None

        entry.neighbours.lose(GONE)

        for outputs in (first, entry.node.generate(order())):
            with pytest.raises(LinkLost) as caught:
                await entry.read(outputs)
            assert caught.value is GONE
        with pytest.raises(LinkLost):
            await waiting
        assert entry.node.is_lost


async def test_messages_of_unknown_sessions_are_ignored() -> None:
    async with running(ring=2) as entry:
        assert entry.neighbours is not None
        outputs = entry.node.generate(order())
        await entry.read(outputs, 1)

        entry.neighbours.deliver(Gap(SessionId(bytes(16)), EPOCH, 0, 0))

        assert ids(await entry.read(outputs)) == [3, 4, 5]


async def test_a_prompt_continues_from_the_cache_of_an_earlier_one() -> None:
    async with running(ring=2, keeps=True) as entry:
        await entry.read(entry.node.generate(order(*LONG)))
        entry.layers.passes.clear()
        sent = list[SessionMessage]()

        def note(message: SessionMessage) -> SessionMessage:
            sent.append(message)
            return travelled(message)

        entry.answer = note
        *_, ended = await entry.read(entry.node.generate(order(*LONG, 50)))

        assert isinstance(sent[0], Resume)
        assert sent[0].length == len(LONG)
        assert entry.layers.passes[0] == ("prefill", [len(LONG)])
        assert isinstance(ended, Ended)
        assert ended.measured.reused == len(LONG)


async def test_a_cache_that_is_taken_over_is_charged_with_all_that_it_has_room_for() -> None:
    async with running(ring=2, keeps=True, blocks=4) as entry:
        await entry.read(entry.node.generate(order(*range(200), tokens=100)), 999)  # 2 blocks
        kept = entry.node.budget.kept_bytes
        turn = entry.node.generate(order(*range(200), 50, tokens=20))  # needs one
        await entry.read(turn, 2)

        assert entry.node.budget.live_bytes == kept == 2 * BLOCK
        *_, ended = await entry.read(turn)
        assert isinstance(ended, Ended)
        assert ended.measured.reused == 200


async def test_a_cache_is_not_taken_over_if_it_has_no_room_to_grow() -> None:
    async with running(ring=2, keeps=True) as entry:
        growing = KvCapacity(3 * BLOCK + BLOCK // 2, lambda tokens: (tokens, tokens // 2))
        entry.node.budget.rooms = [growing, growing]
        await entry.read(entry.node.generate(order(*range(200), tokens=100)), 999)  # 2 blocks
        other = entry.node.generate(order(500, 501, tokens=50))  # one, so that all is used
        await entry.read(other, 1)
        turn = entry.node.generate(order(*range(200), 50, tokens=20))  # needs one
        *tokens, ended = await entry.read(turn, 999)
        await entry.read(other, 999)

        assert ids(tokens) == [*range(51, 71)]
        assert isinstance(ended, Ended)
        assert ended.measured.reused == 0


async def test_an_embedding_takes_the_room_of_kept_caches() -> None:
    async with running(ring=2, keeps=True, blocks=2) as entry:
        await entry.read(entry.node.generate(order(*LONG)))
        assert entry.node.budget.lend(0, lambda: None, is_urgent=True)
        assert entry.node.budget.kept_bytes == BLOCK
        embedded = replace(order(*range(300), tokens=1), on_rows=lambda _: None)
        await entry.read(entry.node.generate(embedded), 1)

        assert entry.node.budget.kept_bytes == 0


async def test_only_what_can_be_resumed_is_kept_when_the_ring_is_lost() -> None:
    async with running(ring=2, keeps=True, resumes=True) as entry:
        embedded = replace(order(*LONG, tokens=1), on_rows=lambda _: None)
        tasks = [entry.node._task(SessionId(bytes(16)), each) for each in (order(*LONG), embedded)]

        assert [each.resumes for each in tasks] == [True, False]


async def test_prompts_share_the_room_for_rows_that_wait() -> None:
    row_bytes = 4
    async with running(ring=2, prompt_bytes=6 * row_bytes) as entry:
        orders = order(*range(1, 9)), order(*range(21, 27))
        generations = [entry.node.generate(each) for each in orders]
        first, second = [asyncio.ensure_future(anext(each, None)) for each in generations]
        for _ in range(3):
            await asyncio.sleep(0)
            await entry.thread.settle()
        assert entry.neighbours is not None
        sent = [(each.pos, each.rows) for each in entry.neighbours.sent if isinstance(each, Data)]
        assert sent == [(0, 4)]  # a chunk of each would be 8 rows

        await entry.drive(first)
        await entry.drive(second)
        assert ids(await entry.read(generations[1])) == [27, 28, 29]
        assert ids(await entry.read(generations[0])) == [9, 10, 11]


async def test_a_prompt_goes_on_when_one_before_it_is_cancelled() -> None:
    async with running(ring=2, prompt_bytes=4 * 4) as entry:
        generations = [entry.node.generate(order(*range(at, at + 8))) for at in (1, 21)]
        first, second = [asyncio.ensure_future(anext(each, None)) for each in generations]
        await asyncio.sleep(0)
        assert len(entry.node._prompts.waiting) == 1

        first.cancel()

        await entry.drive(second)
        assert ids(await entry.read(generations[1])) == [29, 30, 31]


async def test_a_cache_that_was_just_taken_over_is_kept_when_the_ring_is_lost() -> None:
    async with running(ring=2, keeps=True, resumes=True) as entry:
        await entry.read(entry.node.generate(order(*LONG)))
        (before,) = entry.node._prefixes.caches.values()

        asked = asyncio.ensure_future(anext(entry.node.generate(order(*LONG, 50))))
        await asyncio.sleep(0)
        assert entry.node._prefixes.caches == {}  # nothing was computed since
        entry.task.cancel()
        await asyncio.wait([entry.task])

        with pytest.raises(LinkLost):
            await asked
        assert [*entry.node._prefixes.caches.values()] == [before]


@pytest.mark.parametrize(("old_s", "resumes"), [(0.0, True), (RESUME_S, False)])
async def test_an_entry_that_has_nothing_asks_others_for_their_caches_at_first(
    old_s: float, *, resumes: bool
) -> None:
    heard = list[SessionMessage]()

    def hear(message: SessionMessage) -> SessionMessage:
        heard.append(message)
        return travelled(message)

    async with running(ring=2, resumes=True) as entry:
        entry.node._prefixes.lose([0])
        entry.node._since -= old_s
        entry.answer = hear
        asked = replace(order(1, 2, 3, given=(4,)), resume=Resumable("ab" * 16, (3,)))

        with suppress(MeshError):  # these layers cannot recompute
            await entry.read(entry.node.generate(asked))

    found = [(each.length, each.lost) for each in heard if isinstance(each, Resume)]
    assert found == ([(3, (Span(0, 1),))] if resumes else [])


async def test_a_prompt_whose_session_is_not_here_is_paced_like_a_new_one() -> None:
    rows = list[int]()

    def hear(message: SessionMessage) -> SessionMessage:
        if isinstance(message, Data) and message.flags & Flags.PREFILL:
            rows.append(message.rows)
        return travelled(message)

    async with running(ring=2, keeps=True, resumes=True, context=1000, blocks=32) as entry:
        long = LONG[: MIN_SHARED + 1]
        await entry.read(entry.node.generate(order(*long, *LONG[::-1])))
        entry.answer = hear
        asked = replace(order(*long, *range(9)), resume=Resumable("ab" * 16, (4, 5)))

        await entry.read(entry.node.generate(asked))

    assert rows == [4, 4, 1]


async def test_a_prefix_that_another_rank_has_lost_is_forgotten() -> None:
    async with running(ring=2, keeps=True) as entry:
        await entry.read(entry.node.generate(order(*LONG, *LONG, *LONG)))
        (base,) = entry.node._prefixes.caches
        lost = list[SessionMessage]()

        def lack(message: SessionMessage) -> SessionMessage:
            if isinstance(message, Data) and not lost:
                lost.append(message)
                return Gap(message.session, EPOCH, message.gen, 0)
            return travelled(message)

        entry.answer = lack
        *_, ended = await entry.read(entry.node.generate(order(*LONG, 70)))

        assert isinstance(ended, Ended)
        assert ended.measured.reused == 0
        assert base not in entry.node._prefixes.caches


async def test_a_shared_prefix_is_copied_before_another_takes_it_over() -> None:
    async with running(keeps=True) as entry:
        base = LONG * 3
        await entry.read(entry.node.generate(order(*base, tokens=1)))
        sharing = replace(order(*base, *range(20)), shares_prefix=True)
        both = entry.node.generate(sharing), entry.node.generate(order(*base[:-3], 60))
        begun = [asyncio.ensure_future(anext(each, None)) for each in both]
        await asyncio.sleep(0)  # the second has fewer rows left, so it is computed first

        for first in begun:
            await entry.drive(first)
        ends = [(await entry.read(outputs))[-1] for outputs in both]
        reused = [end.measured.reused for end in ends if isinstance(end, Ended)]
        assert reused == [len(base), len(base) - 3]


async def test_a_prefix_that_cannot_be_copied_is_computed_again() -> None:
    async with running(ring=1, keeps=True) as entry:
        await entry.read(entry.node.generate(order(*LONG, *LONG, *LONG)))
        for cache in entry.node._prefixes.caches.values():
            cast("CountedCache", cache).branches = False
        entry.layers.passes.clear()

        *_, ended = await entry.read(entry.node.generate(order(*LONG, 50)))

        assert entry.layers.passes[0] == ("prefill", [0])
        assert isinstance(ended, Ended)
        assert ended.measured.reused == 0


@pytest.mark.parametrize("error", [AttributeError("a bug in model code"), EOFError()], ids=repr)
async def test_model_code_that_cannot_copy_a_prefix_ends_one_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    async with running(ring=1, keeps=True) as entry:
        await entry.read(entry.node.generate(order(*LONG, *LONG, *LONG)))
        with monkeypatch.context() as patch:
            patch.setattr(CountedCache, "branch", fail)
            with pytest.raises(ModelError):
                await entry.read(entry.node.generate(order(*LONG, 50)))
        *_, ended = await entry.read(entry.node.generate(order(7, 8, 9)))

    assert isinstance(ended, Ended)
    assert "the prefix of a prompt is not copied" in caplog.text


async def test_nothing_is_kept_where_the_prefix_cache_is_off() -> None:
    async with running() as entry:
        await entry.read(entry.node.generate(order(*LONG)))

        assert entry.node._prefixes.caches == {}
        assert entry.node.budget.kept_bytes == 0


async def test_the_steps_of_several_generations_share_a_pass() -> None:
    async with running() as entry:
        first, second = entry.node.generate(order()), entry.node.generate(order(7, 8, 9))
        begun = [asyncio.ensure_future(anext(each)) for each in (first, second)]
        await entry.settle()
        await asyncio.gather(*begun)

        assert ids(await entry.read(first)) == [3, 4, 5]
        assert ids(await entry.read(second)) == [10, 11, 12]
        assert entry.layers.passes == [
            ("prefill", [0]),
            ("step", [2]),  # before the next prompt
            ("prefill", [0]),
            ("step", [3, 3]),
            ("step", [4]),
        ]


async def test_a_thought_of_2_000_tokens_gives_its_place_to_a_short_answer() -> None:
    async with running(sessions=2, blocks=100, context=20_000) as entry:
        thought, other = (entry.node.generate(order(tokens=2_000)) for _ in range(2))
        short = entry.node.generate(order(7, 8, 9))
        begun = [asyncio.ensure_future(anext(each)) for each in (thought, other, short)]

        await entry.drive(cast("asyncio.Future[Output | None]", begun[2]))

        prefills = [at for at, (kind, _) in enumerate(entry.layers.passes) if kind == "prefill"]
        passes = prefills[2]  # of both thoughts together
        assert SHORT_ANSWER - QUANTUM < passes < SHORT_ANSWER
        steps = [before for _, before in entry.layers.passes[passes + 1 : passes + 3]]
        assert [3 + at in each for at, each in enumerate(steps)] == [True, True]
        assert ids(await entry.read(short)) == [10, 11, 12]
        for each in (thought, other):
            assert len(ids(await entry.read(each, 4_000))) == 2_000


async def test_kept_prefixes_give_way_to_an_answer_that_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(blocks=5, keeps=True, context=5 * BLOCK) as entry:
        await entry.read(entry.node.generate(order(*range(1, 60))))
        await entry.read(entry.node.generate(order(*range(2, 61))))
        assert entry.node.budget.kept_bytes == 2 * BLOCK
        step = entry.layers.step_many

        def checked(*steps: Any) -> Any:
            assert not entry.node.budget.is_exceeded
            return step(*steps)

        monkeypatch.setattr(entry.layers, "step_many", checked)
        outputs = await entry.read(entry.node.generate(order(tokens=900)), 1000)

        assert len(ids(outputs)) == 900
        assert entry.node.budget.kept_bytes == 5 * BLOCK


@pytest.mark.parametrize("ring", [1, 2])
async def test_an_answer_that_finds_no_room_pauses_until_another_has_ended(ring: int) -> None:
    async with running(ring=ring, blocks=7, context=5 * BLOCK) as entry:
        first, second = (entry.node.generate(order(tokens=900)) for _ in range(2))
        begun = [asyncio.ensure_future(anext(each)) for each in (first, second)]
        for _ in range(3000):
            await entry.settle()

        assert entry.node.sessions == 1  # with room for 900 tokens each, only one would have begun
        paused = await entry.read(second, 2 * BLOCK)
        assert len(ids(await entry.read(first, 1000))) == 900
        rest = await entry.read(second, 1000)
        assert ids([*paused, *rest]) == [each % 100 for each in range(3, 903)]
        assert [each.done() for each in begun] == [True, True]
        assert entry.node.budget.live_bytes == 0


async def test_a_paused_answer_says_so_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.node.session.entry.PAUSED_S", 0.0)
    async with running(blocks=7, context=5 * BLOCK) as entry:
        first, second = (entry.node.generate(order(tokens=900)) for _ in range(2))
        begun = asyncio.ensure_future(anext(first))
        paused = await entry.read(second, 1000)

        assert sum(isinstance(each, Waiting) for each in paused) > 100
        assert await begun
        await first.aclose()
        assert ids([*paused, *await entry.read(second, 1000)]) == [
            each % 100 for each in range(3, 903)
        ]


@pytest.mark.parametrize(
    ("blocks", "context", "count"),
    [
        (100, 2 * BLOCK, 2 * BLOCK - 2),  # to the context
        (12, 20 * BLOCK, 3 * BLOCK),  # a quarter of the room
        (4, 20 * BLOCK, QUANTUM),  # at least
        (1, 20 * BLOCK, BLOCK - 2),  # all there is
    ],
)
async def test_an_answer_without_a_limit_ends_at_the_context_or_by_a_part_of_the_room(
    blocks: int, context: int, count: int
) -> None:
    async with running(blocks=blocks, context=context) as entry:
        outputs = await entry.read(entry.node.generate(order(tokens=None)), 5000)

        assert ids(outputs) == [each % 100 for each in range(3, 3 + count)]
        assert isinstance(outputs[-1], Ended)
        assert outputs[-1].reason is FinishReason.LENGTH


async def test_an_answer_without_a_limit_that_was_begun_is_no_longer_than_a_whole_one() -> None:
    async with running(blocks=12, context=20 * BLOCK) as entry:
        given = tuple(each % 100 for each in range(3, 603))
        outputs = await entry.read(entry.node.generate(order(tokens=None, given=given)), 5000)

        assert len(given) + len(ids(outputs)) == 3 * BLOCK


async def test_a_limit_beyond_the_room_counts_as_what_there_is() -> None:
    async with running(blocks=2, context=20 * BLOCK) as entry:
        outputs = await entry.read(entry.node.generate(order(tokens=9999)), 5000)

        assert len(ids(outputs)) == 2 * BLOCK - 2


class FailingDrafts:
    """A drafter without memory."""

    def begin(self) -> "FailingDrafts":
        return self

    def extend(self, tokens: object) -> None:
        """Take a text."""

    def look(self) -> int:
        raise MemoryError("no memory for drafts")

    draft = keep = look


async def test_an_answer_goes_on_without_drafts_if_their_model_fails() -> None:
    async with running() as entry:
        times = StepTimes(together=True, ring=1)
        entry.node._speculation = Speculation(cast("Drafting", FailingDrafts()), times)

        outputs = await entry.read(entry.node.generate(order(tokens=4)))

        assert ids(outputs) == [3, 4, 5, 6]


async def test_an_invalid_message_ends_its_generation_and_no_other() -> None:
    async with running(ring=2) as entry:
        first, second = entry.node.generate(order()), entry.node.generate(order())
        await entry.read(first, 1)
        read = await entry.read(second, 1)
        (spoiled, _) = entry.node._sessions

        def invalid(message: SessionMessage) -> Delivered:
            if message.session == spoiled and isinstance(message, Data):
                return Malformed(spoiled, message.epoch, "Blob of unknown dtype 99")
            return travelled(message)

        entry.answer = invalid

        with pytest.raises(PeerFault, match="rank 1: Blob of unknown dtype 99"):
            await entry.read(first)
        read += await entry.read(second)

        assert ids(read) == [3, 4, 5]
        assert entry.node.sessions == 0


async def test_invalid_rows_end_their_generation_and_name_their_sender() -> None:
    async with running(ring=2) as entry:

        def narrowed(message: SessionMessage) -> SessionMessage:
            if isinstance(message, Data) and message.flags & Flags.NEED_ROW:
                blob = sealed(session_key(message.session), torch.zeros(1, 1, 2))
                return replace(message, blob=blob)
            return travelled(message)

        entry.answer = narrowed

        with pytest.raises(PeerFault, match="The previous rank sent a hidden state of shape"):
            await entry.read(entry.node.generate(order()))

        entry.answer = travelled
        assert entry.neighbours is not None
        assert entry.neighbours.blamed == 1
        assert Token(3) in await entry.read(entry.node.generate(order()))
