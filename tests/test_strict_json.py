from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm import strict_json
from meshllm.errors import UserError
from meshllm.names import Span
from meshllm.strict_json import MAX_ITEMS, WrongField, build, lay_out, parse


class Colour(StrEnum):
    RED = "red"


class Pair(TypedDict):
    left: str


@dataclass(frozen=True, slots=True)
class Leaf:
    span: Span
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True)
class Tree:
    name: str
    leaves: tuple[Leaf, ...] = ()
    size: float = 1.0
    count: int | None = None
    kind: Literal["oak", "elm"] = "oak"
    pairs: tuple[Pair, ...] = ()
    label: str | tuple[str, ...] = ""
    is_old: bool = False
    numbers: tuple[int, ...] = ()


FULL = Tree("t", (Leaf(Span(0, 4)),), 0.1, 3, "elm", (Pair(left="l"),), ("a", "b"), is_old=True)


def test_lay_out_and_build_round_trip() -> None:
    assert build(Tree, lay_out(FULL)) == FULL


def test_an_undeclared_null_field_is_ignored() -> None:
    assert build(Tree, {"name": "t", "colour": None}) == Tree("t")


def test_a_whole_number_is_a_number() -> None:
    size = build(Tree, {"name": "t", "size": 2}).size

    assert (size, type(size)) == (2.0, float)


def test_an_error_of_an_unknown_member_names_those_that_are_read_elsewhere() -> None:
    with pytest.raises(WrongField) as raised:
        build(Tree, {"name": "t", "colour": 1}, others=("roots",))
    assert raised.value.hint
    assert raised.value.hint.startswith("one of `name`, ")
    assert raised.value.hint.endswith(", `roots`")

    with pytest.raises(WrongField) as raised:
        build(Tree, {"name": "t", "pairs": [{"left": "l", "right": "r"}]}, others=("roots",))
    assert "`roots`" not in str(raised.value.hint)


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        ([], "", "The JSON is a list, not an object"),
        ({}, "name", "`name` is missing"),
        ({"name": 1}, "name", "`name` is a whole number, not text"),
        ({"name": None}, "name", "`name` is null, not text"),
        ({"name": "t", "colour": 1}, "colour", "`colour` is not supported"),
        ({"name": "t", "size": "1"}, "size", "`size` is text, not a number"),
        ({"name": "t", "size": True}, "size", "`size` is true or false, not a number"),
        ({"name": "t", "count": True}, "count",
         "`count` is true or false, not a whole number or null"),
        ({"name": "t", "kind": "ash"}, "kind", "Invalid value `ash` for `kind`"),
        ({"name": "t", "kind": 1}, "kind", "`kind` is a whole number, not text"),
        ({"name": "t", "leaves": {}}, "leaves", "`leaves` is an object, not a list"),
        ({"name": "t", "leaves": [{}]}, "leaves[0].span", "`leaves[0].span` is missing"),
        ({"name": "t", "leaves": [{"span": "0:1", "colour": "blue"}]}, "leaves[0].colour",
         "Invalid value `blue` for `leaves[0].colour`"),
        ({"name": "t", "pairs": [{"left": "l", "right": "r"}]}, "pairs[0].right",
         "`pairs[0].right` is not supported"),
        ({"name": "t", "label": ["a", 2]}, "label[1]", "`label[1]` is a whole number, not text"),
        ({"name": "t", "label": 2}, "label", "`label` is a whole number, not text or a list"),
        ({"name": "t", "numbers": [1, True]}, "numbers[1]",
         "`numbers[1]` is true or false, not a whole number"),
        ({"name": "t", "label": ["a"] * (MAX_ITEMS + 1)}, "label",
         f"`label` has {MAX_ITEMS + 1} items, not at most {MAX_ITEMS}"),
    ],
)  # fmt: skip
def test_a_mismatch_is_named(value: Any, name: str, message: str) -> None:
    with pytest.raises(WrongField) as wrong:
        build(Tree, value)

    assert (wrong.value.name, str(wrong.value)) == (name, message)


def test_a_wrong_span_is_refused() -> None:
    with pytest.raises(UserError, match="Invalid layer span"):
        build(Leaf, {"span": "4:0"})


def test_token_ids_are_not_built_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    built, stock = list[object](), strict_json._Builder.build

    def counted(own: strict_json._Builder, kind: Any, value: object, name: str) -> object:
        built.append(value)
        return stock(own, kind, value, name)

    monkeypatch.setattr(strict_json._Builder, "build", counted)
    build(Tree, {"name": "t", "numbers": list(range(1000))})

    assert len(built) < 10


def test_token_ids_may_be_many() -> None:
    many = list(range(MAX_ITEMS + 1))

    assert build(Tree, {"name": "t", "numbers": many}).numbers == tuple(many)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Invalid JSON"),
        (b"\xff", "can't decode byte 0xff"),
        (b'{"a": 1, "a": 2}', "duplicate name"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"NaN", "not finite"),
        (b"-Infinity", "not finite"),
        (b"1e999", "not finite"),
        (b"1" * 21, "a whole number of 21 digits"),
    ],
)
def test_invalid_json_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(data)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(Tree.__slots__), inner),
)


@pytest.mark.property
@given(_VALUES)
def test_nothing_breaks_the_reader(value: object) -> None:
    try:
        tree = build(Tree, value)
    except UserError:
        return

    assert build(Tree, lay_out(tree)) == tree


@pytest.mark.property
@given(st.binary())
def test_no_bytes_break_the_parser(data: bytes) -> None:
    try:
        parse(data)
    except UserError:
        return
