"""The benchmark of pinned replicas: what it reads of a response, and which cores it takes."""

import json

import pytest

from tests.bench.pinned import Cores, PinnedLoad, Reply, question, reply_of

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4},
}  # fmt: skip


def event(text: str | None, usage: object = None) -> str:
    choices = [] if text is None else [{"delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n"


def chunked(*events: str) -> bytes:
    parts = (b"%x\r\n%s\r\n" % (len(each), each.encode()) for each in (*events, ""))
    return HEAD + b"".join(parts)


def test_a_reply_is_all_pieces_and_the_usage_at_their_end() -> None:
    said = chunked(
        event("a "), ": comment\n\n", event("ring"), event(None, USAGE), "data: [DONE]\n"
    )

    assert reply_of(said) == Reply("a ring", prompt=9, cached=4, tokens=2)


def test_a_chunk_may_end_within_an_event() -> None:
    whole = event("a ring") + event(None, USAGE) + "data: [DONE]\n"

    assert reply_of(chunked(whole[:30], whole[30:])).text == "a ring"


@pytest.mark.parametrize(
    "said", [b"", HEAD, chunked(event("a ")), b"HTTP/1.1 503\r\n\r\n2\r\n{}\r\n"]
)
def test_what_is_not_a_whole_answer_fails(said: bytes) -> None:
    with pytest.raises(ValueError, match="not a whole answer"):
        reply_of(said)


def test_the_api_server_gets_a_core_of_its_own_where_one_is_left() -> None:
    assert Cores.of(2, [0, 1]) == Cores((0, 1), api_server=0)
    assert Cores.of(2, [2, 4, 6]) == Cores((2, 4), api_server=6)
    with pytest.raises(ValueError, match="2 replicas need as many cores, 1 are free"):
        Cores.of(2, [3])


def test_the_rate_leaves_the_last_quarter_of_the_answers_out() -> None:
    load = PinnedLoad(
        replicas=1,
        model="builtin",
        answers=[(1.0, 10), (2.0, 20), (4.0, 10), (100.0, 1)],
        prompt=8,
        cached=6,
    )

    assert load.rate == 10.0
    assert load.hits == 0.75


def test_chats_begin_with_questions_of_their_own() -> None:
    asked = {question(number, turn) for number in range(64) for turn in range(3)}

    assert len(asked) == 64 * 3
