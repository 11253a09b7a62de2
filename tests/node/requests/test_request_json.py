import json
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import (
    IntegrityFault,
    LinkLost,
    MeshError,
    ModelError,
    ModelMissing,
    NotAuthorised,
    NotServed,
    PeerFault,
    PluginError,
    QuotaUsed,
    TimedOut,
    UserError,
)
from meshllm.json_shape import MAX_VALUES
from meshllm.names import LossCause
from meshllm.node.requests import request_json
from meshllm.node.requests.request_json import (
    EVENT_BYTES,
    LINE_CHARS,
    LINE_TOKENS,
    MAX_CALLS,
    MAX_COUNT,
    PADDED_BYTES,
    REQUEST_BYTES,
    REQUEST_NUMBER_BYTES,
    AnswerReader,
    error_from_fields,
    error_to_fields,
    error_to_json,
    event_from_json,
    event_to_json,
    event_to_lines,
    request_from_json,
    request_to_json,
)
from meshllm.protocol.kv_cache.prefix_scope import MAX_SCOPE_CHARS
from meshllm.request import (
    Event,
    FinishReason,
    Interruption,
    Logprob,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Resumable,
    Sampling,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Tools,
    Turn,
    Waiting,
)
from meshllm.strict_json import MAX_ITEMS, WrongField
from tests.builders.fake_ring import answer_of

_TOLD = TokenLogprobs(Logprob(5, "a", (97,), -0.5), (Logprob(6, "\ufffd", (240,), -1.5),))
EVENTS: list[Event] = [
    Waiting("desk loads it"),
    PromptTokens(16, (1, 2)), Prefilled(1, 2), Resumable("a1", (4, 9), (9,), cached=2),
    Interruption(LossCause.NODE_LOST, "attic is gone", 0.6),
    Piece("a\u2028\nb"), Piece("a", (5,), (_TOLD,)), answer_of("hello", 2),
    Piece("", reasoning="Hm", calls=(ToolCallDelta(0, "f", "{"), ToolCallDelta(0, arguments="}"))),
    replace(answer_of("a", 1), reasoning="Hm", calls=(ToolCall("f", "{}"),), reasoning_tokens=3),
    replace(answer_of("", 0), embedding="AACAPwAAAAA="),
]  # fmt: skip
USER: Turn = {"role": "user", "content": "a"}
CALL: Turn = {"role": "assistant", "content": "", "tool_calls": (ToolCall("f", "{}", "a"),)}
RESULT: Turn = {"role": "tool", "content": "done", "tool_call_id": "a"}
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_TURNS = st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text())


@pytest.mark.property
@given(
    st.lists(_TURNS), st.builds(Sampling, temperature=_FLOATS, seed=st.integers(0, 2**63 - 1)),
    st.integers(1, 2**31), st.lists(st.text()),
)  # fmt: skip
def test_a_request_round_trips(
    turns: list[tuple[Any, str]], sampling: Sampling, max_tokens: int, stop: list[str]
) -> None:
    asked = tuple(Turn(role=role, content=text) for role, text in turns)
    request = Request(asked, None, sampling, max_tokens, tuple(stop))

    line = request_to_json(request)

    assert request_from_json(line) == request
    assert b"\n" not in line


def test_a_request_with_tools_round_trips() -> None:
    request = Request(
        (CALL, RESULT), tools=Tools('[{"name": "f"}]', is_required=True), thinks=False
    )

    assert request_from_json(request_to_json(request)) == request


@pytest.mark.parametrize(
    "turns", [(USER,), (CALL, RESULT), (CALL,)], ids=["texts", "both", "calls"]
)
def test_a_request_with_as_many_turns_as_the_api_takes_round_trips(turns: tuple[Turn, ...]) -> None:
    chat = turns * (MAX_ITEMS // len(turns))
    request = Request(chat, stop=("a",) * 4, trusted=("a",) * 99)

    assert request_from_json(request_to_json(request)) == request


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Request(trusted=("a",) * MAX_VALUES), f"more than {MAX_VALUES} values"),
        (Request(ids=(10**9,) * 100_000), f"more than {REQUEST_NUMBER_BYTES} bytes of numbers"),
    ],
)
def test_a_request_beyond_the_limits_of_its_reader_is_not_sent(
    asked: Request, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        request_to_json(asked)


def test_a_node_of_an_earlier_version_sees_no_limit_as_its_own() -> None:
    assert b"max_tokens" not in request_to_json(Request(ids=(1,)))
    assert request_from_json(b'{"ids": [1], "max_tokens": null}').max_tokens is None


def test_an_answer_without_a_limit_continues_after_any_tokens() -> None:
    request = Request(ids=(1,), given=(2,) * 9999)

    assert request_from_json(request_to_json(request)) == request


def test_a_request_that_embeds_round_trips() -> None:
    request = Request(ids=(1, 2), embeds=True, dimensions=8, max_tokens=0)

    assert request_from_json(request_to_json(request)) == request


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_round_trips(event: Event) -> None:
    line = event_to_json(event)

    assert event_from_json(line) == event
    assert b"\n" not in line


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"raw":"a","turns":[{"role":"user","content":"b"}]}', "cannot be combined"),
        (b'{"max_tokens":-1}', "`max_tokens` is -1, not at least 0"),
        (b'{"turns":[{"role":"me","content":"b"}]}', "Invalid value `me` for `turns.0..role`"),
        (b" " * (REQUEST_BYTES + 1), f"{REQUEST_BYTES + 1} bytes long"),
    ],
)
def test_an_invalid_request_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        request_from_json(data)


def test_a_prompt_with_a_surrogate_is_refused_before_it_is_sent() -> None:
    with pytest.raises(UserError, match="unpaired surrogate"):
        request_to_json(Request(raw="\udcff"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"piece":"a","prefilled":[1,2]}',
        b'{"prefilled":[1]}',
        b'{"prompt":{"start":0,"tokens":[%s1]}}' % (b"1," * LINE_TOKENS),
        b'{"prompt":{"start":0,"tokens":[-1]}}',
        b'{"prompt":{"start":0,"tokens":[4294967296]}}',
        b'{"piece":1}',
        b'{"answer":{}}',
        b'{"error":{}}',
        b" " * (EVENT_BYTES + 1),
    ],
)
def test_a_malformed_line_is_a_peer_fault(data: bytes) -> None:
    with pytest.raises(PeerFault):
        event_from_json(data)


@pytest.mark.parametrize("data", [b"{}", b'{"piece":null}', b'{"audio":1}', b'{"tokens":[1]}'])
def test_a_line_of_a_later_version_is_not_an_event(data: bytes) -> None:
    assert event_from_json(data) is None


def test_unknown_fields_are_ignored_and_an_unknown_finish_is_a_stop() -> None:
    line = json.loads(event_to_json(answer_of("hello", 2)))
    line["answer"] |= {"finish_reason": "tool_calls", "energy_j": 3}
    line["answer"]["hops"] = [{**hop, "joules": 1} for hop in line["answer"]["hops"]]
    request = json.loads(request_to_json(Request(raw="a"))) | {"unheard_of": {"5": 1}}

    event = event_from_json(json.dumps(line | {"more": 1}).encode())

    assert event == replace(answer_of("hello", 2), finish_reason=FinishReason.STOP)
    assert request_from_json(json.dumps(request).encode()) == Request(raw="a")


@pytest.mark.parametrize("count", [0, 1, LINE_TOKENS, LINE_TOKENS + 1, 700_000])
def test_an_answer_of_any_length_travels_in_bounded_lines_and_repeats_nothing(count: int) -> None:
    text = "\x00" * count
    answer = replace(answer_of("", 0), text=text, tokens=tuple(range(count)))
    reader = AnswerReader()

    lines = [line for event in (Piece(text), answer) for line in event_to_lines(event)]
    events = [event for line in lines if (event := reader.take(line))]

    assert events[-1] == answer
    assert "".join(event.text for event in events if isinstance(event, Piece)) == text
    assert max(map(len, lines)) <= 512 * 1024 < EVENT_BYTES
    assert len(lines) == -(-count // LINE_CHARS) + max(1, -(-count // LINE_TOKENS))
    assert sum(map(len, lines)) < 14 * count + 1000


def test_the_length_of_a_line_does_not_tell_the_tokens_apart() -> None:
    texts = "", "a", " internationalisation", "\n", '"', "\u4e2d\u6587", "\U0001f98a", "a" * 60
    pieces = [Piece(text, (token,)) for text in texts for token in (1, 262_143)]

    lines = [line for piece in pieces for line in event_to_lines(piece)]

    assert {len(line) for line in lines} == {PADDED_BYTES}
    assert [event_from_json(line) for line in lines] == pieces
    assert {len(line) for line in event_to_lines(Piece("a" * 500, (1,)))} == {5 * PADDED_BYTES}


def test_an_embedding_is_sent_in_one_bounded_line() -> None:
    answer = replace(answer_of("", 0), embedding="A" * (16_384 * 16 // 3 // 16 * 16))

    (line,) = event_to_lines(answer)

    assert AnswerReader().take(line) == answer
    assert len(line) < 128 * 1024


@pytest.mark.parametrize(
    "embedding", ["?", "AAA", "AA==", "AACAPw==AACAPw==", "AADAfw==", "AACA/w=="]
)
def test_an_embedding_of_a_peer_is_of_finite_numbers(embedding: str) -> None:
    data = event_to_json(replace(answer_of("", 0), embedding=embedding))

    with pytest.raises(PeerFault, match="An embedding is not base64"):
        event_from_json(data)


def test_long_calls_and_reasoning_travel_in_bounded_lines() -> None:
    long = "x" * (2 * LINE_CHARS + 1)
    piece = Piece("a", (5,), reasoning=long, calls=(ToolCallDelta(0, "f", long),))
    called = (ToolCall("f", long),)
    answer = replace(answer_of("a", 0), text="a", reasoning=long, calls=called, tokens=(5,))
    reader = AnswerReader()

    lines = [line for event in (piece, answer) for line in event_to_lines(event)]
    *pieces, whole = [event for line in lines if (event := reader.take(line))]

    assert whole == answer
    assert [each.tokens for each in pieces if isinstance(each, Piece)] == [
        (),
        (),
        (),
        (),
        (),
        (),
        (5,),
    ]
    assert max(map(len, lines)) < 2 * LINE_CHARS


def test_a_reader_accepts_no_more_ids_than_a_session_has() -> None:
    reader = AnswerReader()

    with patch.object(request_json, "MAX_TOKENS", 3):
        reader.take(b'{"tokens":[1,2]}')
        with pytest.raises(PeerFault, match="more than 3 tokens"):
            reader.take(b'{"tokens":[1,2]}')


@pytest.mark.parametrize(
    "line",
    [
        b'{"piece":"abc"}',
        b'{"piece":"","reasoning":"abc"}',
        b'{"piece":"","calls":[{"index":0,"name":"a","arguments":"bc"}]}',
    ],
)
def test_a_reader_accepts_no_more_text_than_a_session_has(line: bytes) -> None:
    reader = AnswerReader()

    with patch.object(request_json, "MAX_CHARS", 5):
        reader.take(line)
        with pytest.raises(PeerFault, match="more than 5 characters"):
            reader.take(line)


@pytest.mark.parametrize("count", [-1, MAX_COUNT + 1])
@pytest.mark.parametrize(
    "name", ["prompt_tokens", "cached_tokens", "reasoning_tokens", "counted", "done", "total"]
)
def test_a_number_of_tokens_that_no_answer_has_is_a_peer_fault(name: str, count: int) -> None:
    most = {"done": MAX_COUNT, "total": MAX_COUNT}
    for value in (MAX_COUNT, count):
        event: Event
        if name in most:
            event = Prefilled(**{**most, name: value})
        else:
            event = replace(answer_of("a", 1), **{name: value})  # type: ignore[arg-type]  # numbers
        with nullcontext() if value == MAX_COUNT else pytest.raises(PeerFault, match="tokens is"):
            assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize("index", [-1, MAX_CALLS])
def test_a_reader_accepts_the_first_calls_of_an_answer(index: int) -> None:
    reader = AnswerReader()
    last = Piece("", calls=(ToolCallDelta(MAX_CALLS - 1, "f", "x"),))
    assert reader.take(event_to_json(last)) == last

    with pytest.raises(PeerFault, match=f"one of the first {MAX_CALLS}"):
        reader.take(event_to_json(Piece("", calls=(ToolCallDelta(index, "f", "x"),))))


def test_a_reader_stores_nothing_of_pieces_without_text() -> None:
    reader = AnswerReader()
    reader.take(event_to_json(Piece("", calls=(ToolCallDelta(0, "f", "{}"),))))

    for _ in range(1000):
        reader.take(event_to_json(Piece("", calls=(ToolCallDelta(0),))))

    written = reader._written
    assert (written._text, written._reasoning) == ([], [])
    assert written._calls == [("f", ["{}"])]


@pytest.mark.property
@given(st.binary())
def test_no_bytes_break_the_reader_of_events(data: bytes) -> None:
    with suppress(PeerFault):
        assert event_from_json(data) is None  # `{}` is of no kind that is known


@pytest.mark.parametrize(
    "kind",
    [
        MeshError, UserError, LinkLost, ModelError, ModelMissing, NotAuthorised, TimedOut,
        PeerFault, IntegrityFault, PluginError,
    ],
)  # fmt: skip
def test_an_error_keeps_its_kind_text_and_hint(kind: type[MeshError]) -> None:
    with pytest.raises(kind, match="what") as raised:
        event_from_json(error_to_json(kind("what", hint="do")))

    assert type(raised.value) is kind
    assert raised.value.hint == "do"


def test_an_error_has_the_fields_of_openai_and_ours() -> None:
    assert error_to_fields(WrongField("n", "`n` is 2", hint="use 1")) == {
        "message": "`n` is 2",
        "type": "invalid_request_error",
        "param": "n",
        "code": "user_error",
        "hint": "use 1",
        "exit_code": 2,
    }


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (ModelError("the files do not fit"), "server_error"),
        (ModelMissing("no/model"), "invalid_request_error"),
    ],
)
def test_only_a_missing_model_is_a_fault_of_the_request(error: MeshError, type_: str) -> None:
    assert error_to_fields(error)["type"] == type_


@pytest.mark.parametrize(
    ("sent", "read"), [(7, 7), (None, 0), (-1, 0), (10**9, request_json.MAX_RETRY_S)]
)
def test_an_error_says_when_tokens_are_free_within_a_day(sent: int | None, read: int) -> None:
    error = error_from_fields(error_to_fields(QuotaUsed("what")) | {"retry_s": sent})

    assert isinstance(error, QuotaUsed)
    assert error.retry_s == read


@pytest.mark.parametrize(("sent", "read"), [(7, 7), (-1, 0), (10**9, request_json.MAX_RETRY_S)])
def test_an_error_says_when_a_ring_may_serve(sent: int, read: int) -> None:
    error = error_from_fields(error_to_fields(NotServed("what", retry_s=sent)))

    assert isinstance(error, NotServed)
    assert error.retry_s == read


def test_a_reason_to_wait_is_bounded_at_both_ends() -> None:
    reason = "x" * request_json.MESSAGE_CHARS
    line = event_to_json(Waiting(2 * reason))
    long = json.dumps({"waiting": {"reason": 2 * reason}}).encode()

    assert line == event_to_json(Waiting(reason))
    assert event_from_json(line) == event_from_json(long) == Waiting(reason)


def test_a_timeout_of_an_earlier_version_does_not_say_when() -> None:
    error = error_from_fields(error_to_fields(TimedOut("what")))

    assert type(error) is TimedOut


def test_an_error_of_a_newer_version_keeps_its_message() -> None:
    error = error_from_fields(error_to_fields(MeshError("what")) | {"code": "tired"})

    assert (type(error), str(error)) == (MeshError, "what")


def test_the_length_of_an_error_is_bounded() -> None:
    error = error_from_fields(error_to_fields(MeshError("x" * 10_000, hint="y" * 10_000)))

    assert len(str(error)) == len(error.hint or "") == request_json.MESSAGE_CHARS


def test_a_malformed_error_is_a_peer_fault() -> None:
    assert isinstance(error_from_fields(json.loads('{"message": 1}')), PeerFault)


def test_it_needs_no_torch() -> None:
    module = "meshllm.node.requests.request_json"
    code = f"import sys, {module}; print({{'torch', 'asyncio'}} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


def test_a_wrong_field_keeps_its_name() -> None:
    with pytest.raises(WrongField, match="It is wrong") as raised:
        event_from_json(error_to_json(WrongField("logit_bias", "It is wrong", hint="mend it")))

    assert (raised.value.name, raised.value.hint) == ("logit_bias", "mend it")


def test_log_probabilities_are_sent_once_with_a_long_piece() -> None:
    lines = [*event_to_lines(Piece("x" * (LINE_CHARS + 1), (5,), (_TOLD,)))]

    found = [event_from_json(line) for line in lines]
    assert [each.logprobs for each in found if isinstance(each, Piece)] == [(), (_TOLD,)]


def test_one_kind_of_prompt_is_accepted() -> None:
    with pytest.raises(WrongField, match="cannot be combined"):
        request_from_json(request_to_json(Request(raw="a", ids=(1,))))


@pytest.mark.parametrize("field", ["max_tokens", "deadline_ms"])
def test_a_limit_is_not_negative(field: str) -> None:
    line = request_to_json(Request(raw="a", **{field: -1}))  # type: ignore[arg-type]  # by name

    with pytest.raises(WrongField, match=f"`{field}` is -1, not at least 0"):
        request_from_json(line)


def test_a_request_of_an_earlier_version_has_no_deadline() -> None:
    fields = json.loads(request_to_json(Request(raw="a", deadline_ms=5)))
    assert request_from_json(json.dumps(fields).encode()).deadline_ms == 5
    del fields["deadline_ms"]

    assert request_from_json(json.dumps(fields).encode()).deadline_ms == 0


def test_a_scope_is_short() -> None:
    for size, is_read in ((MAX_SCOPE_CHARS, True), (MAX_SCOPE_CHARS + 1, False)):
        line = request_to_json(Request(raw="a", scope="x" * size))
        with nullcontext() if is_read else pytest.raises(WrongField, match="more than 64"):
            assert request_from_json(line).scope == "x" * size


@pytest.mark.parametrize("group", [None, "", "0123456789abcdef01"])
def test_a_request_may_name_a_ring_by_its_id_in_hex(group: str | None) -> None:
    request = Request(raw="a", group=group)

    assert request_from_json(request_to_json(request)) == request


def test_a_request_of_an_earlier_version_names_no_ring() -> None:
    fields = json.loads(request_to_json(Request(raw="a", group="")))
    del fields["group"]

    assert request_from_json(json.dumps(fields).encode()).group is None


@pytest.mark.parametrize(
    "group",
    ["0", "00", "0" * 16, "0" * 20, "0" * 999, "A" * 18, "g" * 18, " " * 18, "0" * 18 + "\n"],
)
def test_a_ring_is_named_by_nothing_but_an_id(group: str) -> None:
    with pytest.raises(WrongField, match="not the id of a ring") as refused:
        request_from_json(request_to_json(Request(raw="a", group=group)))
    assert refused.value.name == "group"


@pytest.mark.parametrize("group", [1, 1.5, True, ["00"], {"id": "00"}])
def test_the_id_of_a_ring_is_text(group: object) -> None:
    fields = json.loads(request_to_json(Request(raw="a"))) | {"group": group}

    with pytest.raises(WrongField, match="`group` is"):
        request_from_json(json.dumps(fields).encode())
