"""Streams of text: whole characters, the right spaces, nothing after a stop text."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm.model.text.detokenizer import Detokenizer
from meshllm.strict_json import WrongField
from tests.builders.small_tokenizers import byte_fallback, byte_level, metaspace, word_piece

UNICODE = st.text(st.characters(codec="utf-8"), max_size=24)
FEW = st.text("ab é🙂", max_size=24)


def whole(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def pieces(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    stream = Detokenizer(lambda ids: whole(tokenizer, ids), stop=stop)
    return [*map(stream.push, tokens), stream.finish()]


def cut(text: str, stop: Sequence[str]) -> str:
    """Cut at the stop text that is complete first; of those, at the longest."""
    for end in range(len(text) + 1):
        complete = [len(one) for one in stop if text[:end].endswith(one)]
        if complete:
            return text[: end - max(complete)]
    return text


@pytest.mark.property
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@settings(deadline=None)
@given(text=UNICODE)
def test_pieces_of_any_text_are_whole_characters_and_join_to_it(
    make: Callable[[], Any], text: str
) -> None:
    tokens = make().encode(text, add_special_tokens=False)

    parts = pieces(make(), tokens)

    assert "".join(parts) == whole(make(), tokens)
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@pytest.mark.property
@pytest.mark.parametrize("make", [metaspace, word_piece])
@settings(deadline=None)
@given(text=st.text("ab é🙂.,'", max_size=24))
def test_spaces_are_where_the_whole_has_them(make: Callable[[], Any], text: str) -> None:
    tokens = make().encode(text, add_special_tokens=False)

    assert "".join(pieces(make(), tokens)) == whole(make(), tokens)


@pytest.mark.property
@pytest.mark.parametrize("make", [byte_level, metaspace, word_piece])
@settings(deadline=None)
@given(data=st.data())
def test_random_tokens_join_to_what_they_decode_to(
    make: Callable[[], Any], data: st.DataObject
) -> None:
    ids = st.integers(0, len(make()) - 1)
    tokens = data.draw(st.lists(ids, max_size=30))

    assert "".join(pieces(make(), tokens)) == whole(make(), tokens)


def test_half_a_character_waits_for_the_other_half() -> None:
    tokens = byte_level().encode("€x", add_special_tokens=False)

    parts = pieces(byte_level(), tokens)

    assert parts == ["", "", "€", "x", ""]


def byte_tokens(data: bytes) -> list[int]:
    """Return the tokens of single bytes in the byte fallback vocabulary."""
    return [2 + byte for byte in data]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("😀€é".encode(), "😀€é"),
        (b"\xff", "�"),
        ("€".encode() + b"\xff" + "é".encode(), "€���"),  # a run of bytes is valid as a whole
        ("€".encode()[:2], "��"),
        ("�你".encode(), "�你"),  # a character that happens to be the replacement
        ("é��é".encode(), "é��é"),
        ("�".encode() + b"\xff", "��"),
    ],
)
def test_a_run_of_fallback_bytes_never_changes_emitted_text(data: bytes, text: str) -> None:
    parts = pieces(byte_fallback(), byte_tokens(data))

    assert "".join(parts) == text


def test_an_incomplete_character_ends_as_one_replacement() -> None:
    tokens = byte_level().encode("ok 😀", add_special_tokens=False)[:-1]

    *parts, rest = pieces(byte_level(), tokens)

    assert "".join(parts) == "ok "
    assert rest == "�"


def test_finish_returns_nothing_twice() -> None:
    stream = Detokenizer(lambda ids: "a st" if ids else "", stop=["stop"])

    assert stream.push(0) == "a "
    assert stream.finish() == "st"
    assert stream.finish() == ""


def test_an_unknown_token_does_not_take_the_next_space() -> None:
    a = byte_fallback().convert_tokens_to_ids("▁a")

    assert "".join(pieces(byte_fallback(), [a, 10**6, a])) == "a a"


@pytest.mark.parametrize("kind", ["text", "one byte", "bytes", "unknown"])
def test_a_token_costs_the_same_late_in_an_answer(kind: str) -> None:
    chaos = random.Random(3)
    tokenizer = byte_level()
    tokens = {
        "text": tokenizer.encode("the ring 你好 🙂 " * 50, add_special_tokens=False),
        "one byte": [tokenizer.convert_tokens_to_ids("ÿ")] * 500,
        "bytes": [chaos.randrange(2, 258) for _ in range(500)],
        "unknown": [10**6] * 500,
    }[kind]
    windows: list[int] = []

    def decode(ids: list[int]) -> str:
        windows.append(len(ids))
        return whole(tokenizer, ids)

    stream = Detokenizer(decode)
    text = "".join([*map(stream.push, tokens), stream.finish()])

    assert max(windows) <= 66
    assert len(windows) <= 2 * len(tokens) + 1 + len(tokens) // 8
    assert kind == "bytes" or text == whole(tokenizer, tokens)


@pytest.mark.property
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@settings(deadline=None)
@given(text=FEW, stop=st.lists(st.text("ab é🙂", min_size=1, max_size=4), max_size=4))
def test_a_text_ends_before_its_first_stop(
    make: Callable[[], Any], text: str, stop: list[str]
) -> None:
    tokens = make().encode(text, add_special_tokens=False)

    assert "".join(pieces(make(), tokens, stop)) == cut(whole(make(), tokens), stop)


@pytest.mark.property
@settings(deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=5), max_size=8),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_the_cut_does_not_depend_on_the_tokens(parts: list[str], stop: list[str]) -> None:
    stream = Detokenizer(lambda ids: "".join(parts[i] for i in ids), stop=stop)

    shown = [*map(stream.push, range(len(parts))), stream.finish()]

    text = "".join(parts)
    assert "".join(shown) == cut(text, stop)
    assert stream.stopped == any(one in text for one in stop)


def test_a_possible_start_of_a_stop_text_is_held_back() -> None:
    words = ["one ", "<|", "im", "_end", "ing", "<|im_end|>", "more"]
    stream = Detokenizer(lambda ids: "".join(words[i] for i in ids), stop=["<|im_end|>"])

    shown = [stream.push(token) for token in range(7)]

    assert shown == ["one ", "", "", "", "<|im_ending", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


@pytest.mark.parametrize("words", [["xabcx"], ["x", "a", "b", "c"], ["xa", "bc"]])
def test_of_two_stops_the_first_to_be_complete_counts(words: list[str]) -> None:
    stream = Detokenizer(lambda ids: "".join(words[i] for i in ids), stop=["abc", "b"])

    assert "".join(map(stream.push, range(len(words)))) == "xa"


@pytest.mark.parametrize("stop", [[""], ["x" * 1025], ["x"] * 65])
def test_impossible_stop_texts_are_refused(stop: list[str]) -> None:
    with pytest.raises(WrongField, match="stop text"):
        Detokenizer(lambda _: "", stop=stop)
