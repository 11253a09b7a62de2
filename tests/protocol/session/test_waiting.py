"""Rows that wait on a rank: how much room they have, and which prompt may send more."""

from collections import deque
from dataclasses import dataclass

import pytest

from meshllm.names import NodeId, SessionId, Span
from meshllm.protocol.drafting.window import MAX_STEP_ROWS
from meshllm.protocol.kv_cache.admission import MAX_OPEN_SESSIONS, MAX_SESSIONS
from meshllm.protocol.kv_cache.prefix_index import Chunk, PrefixHit
from meshllm.protocol.planning.chunking import RankTimes, RingTimes, default_pace
from meshllm.protocol.planning.plan import LinkSpeed, Offer
from meshllm.protocol.session.actions import Closed, Embed, Failed, GenerationTask, SampleTokens
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.codec import MAX_POSITION, MAX_ROWS
from meshllm.protocol.session.entry import Entry
from meshllm.protocol.session.messages import Blob, Close, DType, Forward, JobTimes, RankStats
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import MAX_PENDING, Action, Compute, Stage, Withdraw
from meshllm.protocol.session.waiting import MAX_DATA_BYTES, PromptQueue, RowQueueLimits
from meshllm.request import FinishReason
from meshllm.transport.contract import MAX_MESSAGE_BYTES

EPOCH = 5
SPENT = JobTimes(1, 0, 0)
QWEN, EMBEDDED = 1024 * 2, 256 * 2  # bytes of a row: Qwen3-0.6B, the model of 10 MB; bf16
CPU = ((1, 1.5e-3), (32, 4e-3), (256, 28e-3))  # s of a layer of Qwen3-0.6B on two cores
GPU = ((1, 4e-5), (32, 4e-5), (256, 6e-5))
ROW = 4  # bytes; one bf16 pair, so that rows of whole prompts fit into a test
ONE, TWO, THREE = (SessionId(bytes([number]) * 16) for number in (1, 2, 3))


def blob(session: SessionId, rows: int) -> Blob:
    return seal(session_key(session), DType.BFLOAT16, (1, rows, ROW // 2), bytes(ROW * rows))


def task(session: SessionId, prompt: int, given: int = 0) -> GenerationTask:
    tokens, most = (7,) * prompt, MAX_POSITION
    return GenerationTask(session, EPOCH, 2, tokens, max_tokens=1, context=most, given=given)


def chunks_in_flight(prompt: int, pace: PrefillPacing, queue: PromptQueue) -> int:
    """Return how many chunks an entry sends before one comes back."""
    entry = Entry(task(ONE, prompt), pace, queue)
    actions, count = list(entry.open(0.0)), 0
    while actions and isinstance(actions[-1], Embed):
        actions, count = entry.computed(None, 0.0), count + 1
    return count


def measured(ring: int, layer_s: tuple[tuple[int, float], ...], latency_s: float) -> RingTimes:
    offer = Offer(NodeId(bytes(32)), 0, layer_s, 0.0)
    rank = RankTimes(offer, 28 / ring, LinkSpeed(latency_s, 125e6))
    return RingTimes((rank,) * ring, 0.0, QWEN)


@pytest.mark.parametrize("row_bytes", [QWEN, EMBEDDED])
@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("prompt", [3000, 30_000])
def test_a_prompt_alone_has_as_many_chunks_in_flight_as_when_each_session_had_64_mib(
    row_bytes: int, ring: int, prompt: int
) -> None:
    paces = [
        default_pace(prompt, ring),
        *(
            measured(ring, table, latency_s).best_pace(prompt)
            for table in (CPU, GPU)
            for latency_s in (1e-4, 0.02)
        ),
        *(PrefillPacing(chunk=chunk, window=ring) for chunk in (1024, 3072, MAX_ROWS)),
    ]

    for pace in paces:
        queue = PromptQueue(RowQueueLimits(row_bytes).prompt_bytes // row_bytes)
        before = min(pace.window, (64 << 20) // (pace.chunk * row_bytes))
        assert chunks_in_flight(prompt, pace, queue) == min(before, -(-prompt // pace.chunk))


@pytest.mark.parametrize(("chunk", "window"), [(256, 16), (1024, 16), (4096, 4)])
def test_a_prompt_alone_has_all_the_room(chunk: int, window: int) -> None:
    queue = PromptQueue(RowQueueLimits(QWEN).prompt_bytes // QWEN)

    assert chunks_in_flight(200_000, PrefillPacing(chunk=chunk, window=16), queue) == window


@dataclass
class Fed:
    """An entry with several prompts, and a rank on which all their rows wait."""

    queue: PromptQueue
    entries: dict[SessionId, Entry]
    stage: Stage
    computing: deque[Compute]
    order: list[SessionId]
    """Whose chunks were computed."""
    most: int = 0

    def take(self, session: SessionId, actions: list[object]) -> None:
        """Do what a machine asks for; rows that are sent wait on the rank."""
        entry = self.entries[session]
        while actions:
            match actions.pop(0):
                case Embed(tokens=tokens):
                    actions += entry.computed(blob(session, len(tokens)), 0.0)
                case Forward(message):
                    self.run(self.stage.receive(message, 0.0))
                case SampleTokens():
                    actions += entry.sampled((9,), 0.0)
                case Failed(text=text):
                    pytest.fail(text)
                case _:
                    pass
        while turn := self.queue.next():
            self.take(turn, [*self.entries[turn].proceed()])
        self.most = max(self.most, self.stage.waiting_bytes)

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Compute():
                    self.computing.append(action)
                case Withdraw(session):
                    self.drop(session)
                case Forward(message):
                    entry = self.entries[message.session]
                    self.take(message.session, [*entry.receive(message, 0.0)])
                case _:
                    pass

    def drop(self, session: SessionId) -> None:
        """Forget rows of a session, but those that are being computed: the first ones."""
        for job in list(self.computing)[1:]:
            if job.session == session:
                self.computing.remove(job)
                self.run(self.stage.withdrawn(session))

    def start(self, number: int, tokens: int, pace: PrefillPacing) -> SessionId:
        """Begin with a prompt."""
        name = SessionId(number.to_bytes(16, "big"))
        self.entries[name] = Entry(task(name, tokens), pace, self.queue)
        self.take(name, [*self.entries[name].open(0.0)])
        return name

    def compute(self) -> None:
        """Compute what was asked for first."""
        job = self.computing.popleft()
        self.order.append(job.session)
        row = blob(job.session, job.keep) if job.keep else None
        self.run(self.stage.computed(job.session, row, 0.0, SPENT))


def feed(room: RowQueueLimits, prompts: int, tokens: int, pace: PrefillPacing) -> Fed:
    queue = PromptQueue(room.prompt_bytes // ROW)
    names = [SessionId(number.to_bytes(16, "big")) for number in range(prompts)]
    entries = {name: Entry(task(name, tokens), pace, queue) for name in names}
    stage = Stage(1, 2, epoch=EPOCH, max_waiting=room.max_waiting)
    fed = Fed(queue, entries, stage, deque(), [])
    for name, entry in entries.items():
        fed.take(name, [*entry.open(0.0)])
    return fed


@pytest.mark.no_cover
@pytest.mark.parametrize(("chunk", "window"), [(4096, 16), (1500, 4), (1024, 8), (64, 16)])
def test_prompts_of_all_sessions_never_exceed_the_room(chunk: int, window: int) -> None:
    room, tokens = RowQueueLimits(ROW), 20_000

    fed = feed(room, MAX_SESSIONS, tokens, PrefillPacing(chunk=chunk, window=window))
    while fed.computing:
        fed.compute()

    assert fed.most <= room.prompt_bytes
    full = MAX_SESSIONS * window * chunk * ROW
    assert fed.most >= min(room.prompt_bytes - chunk * ROW, full)  # the room is used
    assert len(fed.order) == MAX_SESSIONS * -(-tokens // chunk)
    assert all(entry.deadline is None for entry in fed.entries.values())  # all have ended
    assert fed.queue.next() is None


def test_prompts_that_share_the_room_take_turns() -> None:
    fed = feed(RowQueueLimits(ROW), MAX_SESSIONS, 40_960, PrefillPacing(chunk=MAX_ROWS, window=16))
    for _ in range(4 + 5 * MAX_SESSIONS):
        fed.compute()

    counts = [fed.order[4:].count(name) for name in fed.entries]  # the first was alone for 4
    assert max(counts) - min(counts) <= 2


@pytest.mark.parametrize("given", [0, 400])
def test_the_steps_of_all_sessions_fit_beside_the_prompts(given: int) -> None:
    """Also those of answers that an earlier ring had begun, while nothing comes back."""
    room, pace = RowQueueLimits(QWEN), PrefillPacing(chunk=1024, window=8)
    queue, names = PromptQueue(room.prompt_bytes // QWEN), list[SessionId]()
    for number in range(MAX_SESSIONS):
        names.append(SessionId(number.to_bytes(16)))
    asked = [task(names[0], 40_960), *(task(name, 260 + given, given) for name in names[1:])]
    entries = {each.session: Entry(each, pace, queue) for each in asked}
    embedding = deque((name, entry.open(0.0)) for name, entry in entries.items())
    while embedding:
        name, actions = embedding.popleft()
        if actions and isinstance(actions[-1], Embed):
            embedding.append((name, entries[name].computed(None, 0.0)))

    rows = sum(entry.in_flight for entry in entries.values())
    steps = (2 * MAX_OPEN_SESSIONS + 4 * MAX_PENDING) * MAX_STEP_ROWS
    assert queue.most_rows - 1024 < rows <= queue.most_rows
    assert room.prompt_bytes + steps * QWEN <= room.max_waiting < room.total


def test_a_room_holds_any_message_and_has_a_limit() -> None:
    assert MAX_DATA_BYTES == MAX_MESSAGE_BYTES
    assert RowQueueLimits(QWEN).prompt_bytes == 4 * MAX_ROWS * QWEN == 32 << 20
    assert RowQueueLimits(1 << 20).prompt_bytes == 4 * MAX_MESSAGE_BYTES
    assert RowQueueLimits(1 << 20).max_waiting == 1 << 30


class Rows:
    """A session with some rows in flight."""

    def __init__(self, in_flight: int = 0) -> None:
        self.in_flight = in_flight


def test_sessions_wait_in_the_order_in_which_they_asked() -> None:
    queue, first = PromptQueue(10), Rows(10)
    queue.enter(ONE, first)

    assert not queue.take(TWO, 6)
    assert not queue.take(THREE, 1)
    assert not queue.take(TWO, 6)  # keeps its place
    first.in_flight = 6
    assert queue.next() is None  # a short one does not overtake
    assert not queue.take(ONE, 1)
    first.in_flight = 4
    assert queue.next() == TWO
    assert queue.take(TWO, 6)
    assert [*queue.waiting] == [THREE, ONE]


def test_who_sends_nothing_more_waits_no_more() -> None:
    queue, first = PromptQueue(10), Rows(10)
    queue.enter(ONE, first)
    queue.take(TWO, 10)
    queue.take(THREE, 10)

    queue.end(TWO)
    queue.end(TWO)
    queue.leave(ONE)

    assert queue.next() == THREE
    assert queue.take(THREE, 10)
    assert queue.next() is None


def test_a_turn_that_is_not_used_passes_to_the_next() -> None:
    queue = PromptQueue(10)
    queue.enter(ONE, blocking := Rows(10))
    queue.take(TWO, 5)
    queue.take(THREE, 5)
    blocking.in_flight = 0

    assert queue.next() == TWO
    assert queue.next() == THREE
    assert queue.take(THREE, 5)


def test_a_session_whose_rows_do_not_fit_in_its_turn_stays_first() -> None:
    queue = PromptQueue(10)
    queue.enter(ONE, blocking := Rows(10))
    queue.take(TWO, 5)
    queue.take(THREE, 5)
    blocking.in_flight = 5

    assert queue.next() == TWO
    assert not queue.take(TWO, 6)  # it began again with a longer chunk
    assert [*queue.waiting] == [TWO, THREE]
    assert queue.next() is None


def test_a_session_in_the_queue_can_end() -> None:
    queue = PromptQueue(4)
    first = Entry(task(ONE, 6), PrefillPacing(chunk=4), queue)
    second = Entry(task(TWO, 6), PrefillPacing(chunk=4), queue)
    first.open(0.0)

    assert second.open(0.0) == []
    second.finish(FinishReason.CANCELLED, 1.0)
    assert second.proceed() == []
    assert [*queue.waiting] == []
    first.finish(FinishReason.CANCELLED, 1.0)
    assert not queue.take(THREE, 1)  # until its rows are known to be gone
    close = Close(ONE, EPOCH, tallies=(RankStats(SPENT, 0, 0, 0),))
    assert first.receive(close, 2.0) == [Closed(close.tallies)]
    assert queue.next() == THREE


def test_a_lost_ring_leaves_the_queue() -> None:
    queue = PromptQueue(4)
    entry = Entry(task(ONE, 6), PrefillPacing(chunk=4), queue)
    entry.open(0.0)

    assert entry.interrupt()

    assert queue.take(TWO, 4)


@pytest.mark.parametrize("is_step", [False, True])
def test_rows_that_are_computed_again_wait_for_their_turn_too(is_step: bool) -> None:
    queue, lost, chunk = PromptQueue(5), (Span(4, 8),), Chunk(5, is_step)
    base = PrefixHit(TWO, 5, whole=False, chunks=(chunk,), lost=lost)
    queue.enter(THREE, other := Rows(1))
    entry = Entry(task(ONE, 9), PrefillPacing(chunk=4), queue)

    (resume,) = entry.open(0.0, base)
    other.in_flight = 0

    assert isinstance(resume, Forward)
    assert queue.next() == ONE
    assert entry.proceed() == [Embed(0, 0, (7,) * 5, 0, is_step, recomputes=True)]


FLOODS = [(8, 1024, 4), (8, 2048, 2), (4, 4096, 4), (8, 512, 16)]
"""Of prompts that are given up at once: how many, their chunk, and window."""


@pytest.mark.parametrize(("prompts", "chunk", "window"), FLOODS)
def test_prompts_that_were_stopped_leave_their_room_to_others(
    prompts: int, chunk: int, window: int
) -> None:
    room, pace = RowQueueLimits(ROW), PrefillPacing(chunk=chunk, window=window)
    fed = feed(room, prompts, 40_960, pace)
    for name, entry in list(fed.entries.items()):
        fed.take(name, [*entry.finish(FinishReason.CANCELLED, 0.0)])

    for number in range(100, 100 + prompts):
        fed.start(number, 40_960, pace)
    while fed.computing:
        fed.compute()

    assert fed.most <= room.max_waiting


@pytest.mark.parametrize(("prompts", "chunk", "window"), FLOODS)
def test_prompts_that_are_sent_again_keep_to_the_room(
    prompts: int, chunk: int, window: int
) -> None:
    room = RowQueueLimits(ROW)
    fed = feed(room, prompts, 40_960, PrefillPacing(chunk=chunk, window=window))

    for _ in range(3):
        for name, entry in list(fed.entries.items()):
            if entry.deadline is not None:
                fed.take(name, [*entry.expire(entry.deadline)])
    while fed.computing:
        fed.compute()

    assert fed.most <= room.max_waiting


def test_a_user_who_stops_again_and_again_takes_no_room_of_others() -> None:
    room, pace = RowQueueLimits(ROW), PrefillPacing(chunk=4096, window=3)
    fed = feed(room, 1, 40_960, pace)

    for number in range(100, 180):
        latest = next(reversed(fed.entries))
        fed.take(latest, [*fed.entries[latest].finish(FinishReason.CANCELLED, 0.0)])
        fed.start(number, 40_960, pace)

    assert fed.stage.waiting_bytes <= room.prompt_bytes + 4096 * ROW
