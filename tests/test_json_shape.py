"""JSON is refused for its shape before it is parsed, and quickly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import UserError
from meshllm.json_shape import MAX_DEPTH, MAX_VALUES, check_shape

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@given(VALUES)
def test_ordinary_json_passes(value: object) -> None:
    check_shape(json.dumps(value).encode())
    check_shape(json.dumps(value, indent=2, ensure_ascii=False).encode())


def test_brackets_within_text_are_text() -> None:
    text = json.dumps({"raw": '[{"[{,:\\"' * MAX_VALUES}).encode()

    check_shape(text, values=3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (nested(MAX_DEPTH + 1), "nested too deeply"),
        (b"[" * 4_000_000, "nested too deeply"),
        (b"[" + b'{"":{}},' * 500_000 + b"1]", "more than 65536 values"),
        (b"[" + b'"",' * 500_000, "more than 65536 values"),
        (b"[" + b"null," * 500_000, "more than 65536 values"),
        (b"[" + b"1," * 3_000_000, "bytes of numbers"),
        (b":" * 5_000_000, "bytes of numbers"),
        (b" " * 5_000_000, "bytes of numbers"),
    ],
    ids=["deep", "open", "objects", "texts", "words", "numbers", "colons", "blanks"],
)
def test_a_shape_beyond_a_limit_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_shape(data)


def test_limits_are_exact() -> None:
    check_shape(nested(MAX_DEPTH))
    check_shape(b'["a", null, {}]', values=4)
    check_shape(b"[1,2,3]", number_bytes=5)
    with pytest.raises(UserError, match="more than 3 values"):
        check_shape(b'["a", null, {}]', values=3)
    with pytest.raises(UserError, match="more than 4 bytes"):
        check_shape(b"[1,2,3]", number_bytes=4)


@given(st.binary())
def test_garbage_is_left_to_the_parser(data: bytes) -> None:
    check_shape(data)
