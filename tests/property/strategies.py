"""Hypothesis strategies for all wire messages, in one place."""

from math import prod

from hypothesis import assume
from hypothesis import strategies as st

from meshllm.names import Digest, NodeId, SessionId, Span
from meshllm.protocol.session.blob import MAX_DIMS, seal, session_key
from meshllm.protocol.session.codec import MAX_POSITION, MAX_ROWS, MAX_TEXT
from meshllm.protocol.session.messages import (
    Blob,
    Cancel,
    Close,
    Data,
    Delivered,
    DType,
    Fault,
    FaultCode,
    Flags,
    Gap,
    Heartbeat,
    Hello,
    JobTimes,
    Logits,
    Malformed,
    Message,
    RankStats,
    Resume,
    UnknownRingMessage,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
sessions = st.binary(min_size=16, max_size=16).map(SessionId)
digests = st.binary(min_size=32, max_size=32).map(Digest)
nodes = st.binary(min_size=32, max_size=32).map(NodeId)
texts = st.text(max_size=MAX_TEXT // 4)


@st.composite
def blobs(draw: st.DrawFn) -> Blob:
    """Small sealed blobs of every dtype and number of dimensions."""
    dtype = draw(st.sampled_from(DType))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=MAX_DIMS)))
    sizes = dtype.sizes(shape)
    assume(sizes)  # a single value cannot be packed
    length = draw(st.sampled_from(sizes))
    payload = draw(st.binary(min_size=length, max_size=length))
    return seal(session_key(draw(sessions)), dtype, shape, payload)


@st.composite
def data(draw: st.DrawFn) -> Data:
    """Data within the limits, with and without a blob."""
    rows = draw(st.integers(1, MAX_ROWS))
    pos = draw(st.integers(0, MAX_POSITION - rows))
    flags = draw(st.sampled_from([Flags(bits) for bits in range(sum(Flags) + 1)]))
    blob = draw(st.none() | blobs())
    return Data(draw(sessions), draw(u32), draw(u32), pos, rows, flags, blob)


losts = st.lists(st.sampled_from([Span(0, 1), Span(2, 9), Span(7, 200)]), max_size=3).map(tuple)
tallies = st.builds(RankStats, st.builds(JobTimes, u64, u64, u64), u32, u64, u32)
keeps = st.integers(0, MAX_POSITION)
closes = st.builds(Close, sessions, u32, keeps, st.lists(tallies, max_size=5).map(tuple))
faults = st.builds(Fault, sessions, u32, st.sampled_from(FaultCode), st.integers(0, 255), texts)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, nodes, u32, digests, st.binary(max_size=9)),
    st.builds(Heartbeat, u64, u64, u64),
    data(),
    st.builds(Gap, sessions, u32, u32, st.integers(0, MAX_POSITION)),
    st.builds(Cancel, sessions, u32, u32),
    st.builds(Logits, sessions, u32, u32, st.integers(0, MAX_POSITION - 1), blobs()),
    st.builds(Resume, sessions, u32, sessions, st.integers(1, MAX_POSITION), st.booleans(), losts),
    closes,
    faults,
    st.builds(UnknownRingMessage, st.integers(100, 255), st.binary(max_size=30)),
)

few_sessions = st.sampled_from([SessionId(name * 16) for name in (b"1", b"2", b"3")])
few_epochs = st.sampled_from([4, 5, 5, 5, 6])
few_gens = st.integers(0, 3)


@st.composite
def rows_of_few(draw: st.DrawFn) -> Data:
    """Data with few distinct sessions, epochs, gens and positions, so that they collide."""
    rows = draw(st.integers(1, 3))
    shape = (1, draw(st.sampled_from([rows, rows, 1])), 2)
    payload = bytes(prod(shape) * 2)
    session = draw(few_sessions)
    blob = draw(st.none() | st.just(seal(session_key(session), DType.BFLOAT16, shape, payload)))
    flags = Flags(draw(st.integers(0, sum(Flags))))
    pos = draw(st.integers(0, 6))
    return Data(session, draw(few_epochs), draw(few_gens), pos, rows, flags, blob)


few_messages: st.SearchStrategy[Delivered] = st.one_of(
    rows_of_few(),
    rows_of_few(),
    st.builds(Malformed, few_sessions, few_epochs, texts, st.booleans()),
    st.builds(Gap, few_sessions, few_epochs, few_gens, st.integers(0, 6)),
    st.builds(Cancel, few_sessions, few_epochs, few_gens),
    st.builds(Logits, few_sessions, few_epochs, few_gens, st.integers(0, 6), blobs()),
    st.builds(
        Resume,
        few_sessions,
        few_epochs,
        few_sessions,
        st.integers(1, 15),
        st.booleans(),
        st.sampled_from([(), (Span(0, 4),), (Span(2, 9),), (Span(4, 8),), (Span(6, 9),)]),
    ),
    st.builds(
        Close, few_sessions, few_epochs, st.integers(0, 9), st.lists(tallies, max_size=2).map(tuple)
    ),
    st.builds(Fault, few_sessions, few_epochs, st.sampled_from(FaultCode), st.just(1), texts),
)
