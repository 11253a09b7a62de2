"""Wire messages round-trip, and malformed input raises nothing but `PeerFault`."""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import IntegrityFault, PeerFault
from meshllm.names import SessionId, Span
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget, KvCapacity
from meshllm.protocol.kv_cache.prefix_index import PrefixIndex
from meshllm.protocol.session import actions as tasks
from meshllm.protocol.session.actions import (
    Closed,
    Done,
    Embed,
    Failed,
    GenerationTask,
    SampleTokens,
)
from meshllm.protocol.session.blob import check, seal, session_key
from meshllm.protocol.session.codec import decode, encode, size
from meshllm.protocol.session.entry import Entry
from meshllm.protocol.session.messages import (
    PROTOCOL_VERSION,
    Blob,
    Close,
    Data,
    Delivered,
    DType,
    Hello,
    JobTimes,
    Logits,
    Message,
    Resume,
    UnknownRingMessage,
)
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import Action, Adopt, Compute, Free, Keep, Stage
from tests.property.strategies import data, few_messages, messages, sessions

pytestmark = pytest.mark.property


@given(messages)
def test_every_message_round_trips(message: Message) -> None:
    assert decode(b"".join(encode(message))) == message


@given(data())
def test_the_size_of_data_is_the_length_of_its_bytes(message: Data) -> None:
    assert size(message) == sum(map(len, encode(message)))


@given(st.binary(max_size=300), st.integers(0, 9))
def test_garbage_is_a_peer_fault_or_a_message(garbage: bytes, kind: int) -> None:
    with suppress(PeerFault):
        decode(garbage)
    with suppress(PeerFault):
        decode(bytes([PROTOCOL_VERSION, kind]) + garbage)


@given(messages, st.data())
def test_damaged_bytes_are_a_peer_fault_or_another_message(
    message: Message, draws: st.DataObject
) -> None:
    encoded = bytearray(b"".join(encode(message)))
    place = draws.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= draws.draw(st.integers(1, 255))

    with suppress(PeerFault):
        assert decode(encoded) != message


_GROWN = Hello, Close, Resume
"""Messages to which a later version appended a field."""


@given(messages, st.data())
def test_a_truncated_message_is_refused_or_re_encodes_to_itself(
    message: Message, draws: st.DataObject
) -> None:
    encoded = b"".join(encode(message))
    part = encoded[: draws.draw(st.integers(0, len(encoded)))]

    with suppress(PeerFault):
        again = b"".join(encode(decode(part)))
        added = again.removeprefix(part) if isinstance(message, _GROWN) else b""
        assert again == part + added
        assert not any(added)  # what earlier versions do not send is none


@given(messages, st.binary(min_size=1, max_size=30))
def test_appended_fields_are_ignored(message: Message, later: bytes) -> None:
    encoded = b"".join(encode(message)) + later
    if isinstance(message, Data | Logits | UnknownRingMessage):  # their payload extends to the end
        with suppress(PeerFault):
            assert b"".join(encode(decode(encoded))) == encoded
    else:
        assert decode(encoded) == message


@given(sessions, st.sampled_from(DType), st.binary(min_size=8, max_size=64), st.data())
def test_one_changed_bit_breaks_the_seal(
    session: SessionId, dtype: DType, payload: bytes, draws: st.DataObject
) -> None:
    key = session_key(session)
    width = max(n for n in range(1, 65) if dtype.sizes((1, n)).stop <= len(payload) + 1)
    payload = payload[: dtype.sizes((1, width)).stop - 1]
    blob = seal(key, dtype, (1, width), payload)
    damaged = bytearray(payload)
    damaged[draws.draw(st.integers(0, len(payload) - 1))] ^= 1 << draws.draw(st.integers(0, 7))

    check(key, blob)

    with pytest.raises(IntegrityFault):
        check(key, Blob(blob.dtype, blob.shape, blob.digest, damaged))


CONTEXT = 12  # positions of a session in a stage


class Rank:
    """The driver of a stage, with lengths instead of KV caches."""

    def __init__(self) -> None:
        self.caches: Counter[SessionId] = Counter()
        self.kept: dict[SessionId, int] = {}
        self.running: dict[SessionId, Compute] = {}
        self.hollow = set[SessionId]()
        """Those that may hold less than the stage counts, until lost layers are recomputed."""

    def finish(self) -> tuple[Compute, bool]:
        """End the oldest computation; return whether the cache had the rows before it."""
        job = self.running.pop(next(iter(self.running)))
        held, end = self.caches[job.session], job.pos + job.rows
        if job.pos > held:
            self.hollow.discard(job.session)
            return job, False
        self.caches[job.session] = max(held, end) if job.recomputes else end
        return job, True

    def resumed(self, session: SessionId) -> None:
        """Take note of a session that has begun without a cache."""
        if session not in self.caches:
            self.hollow.add(session)

    def do(self, action: Action) -> None:
        match action:
            case Compute(session, pos):
                assert session not in self.running
                assert action.recomputes or pos <= self.caches[session] or session in self.hollow
                self.caches[session] += 0
                self.running[session] = action
            case Free(session) if session in self.kept:
                del self.kept[session]
            case Free(session):
                self.running.pop(session, None)
                del self.caches[session]
            case Keep(session):
                self.running.pop(session, None)
                self.kept[session] = self.caches.pop(session, 0)
            case Adopt():
                self.adopt(action)

    def adopt(self, job: Adopt) -> None:
        held = self.kept[job.base]
        assert job.session not in self.caches
        assert job.length <= held or job.base in self.hollow
        if job.length > held:
            self.hollow.add(job.session)
        self.caches[job.session] = min(job.length, held)
        if job.whole:
            del self.kept[job.base]


@given(st.integers(1, 2), st.lists(st.none() | few_messages, max_size=60))
def test_the_caches_of_a_stage_have_no_gap_for_any_input(
    number: int, heard: list[Delivered | None]
) -> None:
    index = PrefixIndex(KvBudget([KvCapacity(2 * BLOCK, lambda tokens: (tokens, 0))]))
    stage = Stage(number, 3, epoch=5, max_sessions=1, context=CONTEXT, index=index, span=Span(4, 8))
    rank = Rank()

    for message in heard:
        actions: list[Action] = []
        if message is not None:
            with suppress(PeerFault):
                actions = stage.receive(message, 0.0)
        elif rank.running:  # None: the oldest computation completes
            job, is_done = rank.finish()
            if is_done:
                actions = stage.computed(job.session, job.blob, 0.0, JobTimes(1, 1, 1))
            else:
                actions = stage.missed(job.session)
        for action in actions:
            rank.do(action)
        if isinstance(message, Resume) and stage.budget.reserved(message.session):
            rank.resumed(message.session)
        assert all(job.pos + job.rows <= CONTEXT for job in rank.running.values())


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)) | few_messages, max_size=60),
)
def test_an_entry_ends_once_and_runs_one_job_at_a_time_for_any_input(
    ring: int, heard: list[Delivered | tuple[int, int]]
) -> None:
    task = GenerationTask(SessionId(b"1" * 16), 5, ring, (1, 2, 3, 4), max_tokens=5, context=8)
    entry = Entry(task, PrefillPacing(chunk=2, window=2))
    actions = entry.open(0.0)
    job: Embed | SampleTokens | None = None
    ends: Counter[type] = Counter()

    def pick(job: SampleTokens, right: int, drafts: int) -> list[tasks.Action]:
        most = len(job.drafts)
        tokens = (7,) * right + (8,) if right < most else (7,) * (1 + most)
        room = job.limit - job.pos - len(tokens) - len(job.flying(tokens) or ())
        steps = [(7,) * drafts, (7,)] if drafts < room else []
        return entry.sampled(tokens, 0.0, [step for step in steps if step])

    for message in heard:
        for action in actions:
            ends[type(action)] += 1
            if isinstance(action, Embed | SampleTokens):
                assert job is None
                job = action
        if not isinstance(message, tuple):
            actions = entry.receive(message, 0.0)
        elif job is not None:  # the job completes: accepted drafts, new drafts
            done, job = job, None
            actions = entry.computed(None, 0.0) if isinstance(done, Embed) else pick(done, *message)
        else:
            actions = entry.expire(1e9)

    assert ends[Done] + ends[Failed] <= 1
    assert ends[Closed] <= ends[Done] + ends[Failed]
