"""Strict decoding of untrusted JSON into frozen dataclasses, and back.

The annotation of a field is its schema, and a field with a default is optional; one of type
`object` takes any JSON. Undeclared fields are rejected unless they are null (clients send our own
messages back with `"refusal": null`). A field whose metadata has a `json` has that name in JSON.
Data of a later version is read with ``strict=False``: unknown fields are ignored, and an unknown
member of an enumeration becomes the first one.
"""

import json
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from meshllm.errors import UserError
from meshllm.json_shape import check_shape
from meshllm.names import Span

T = TypeVar("T")

MAX_ITEMS = 4096  # of a list, except of integers: each item takes microseconds of an event loop
MAX_DIGITS = 20  # of an integer; 64 bits have no more

_WORDS: dict[type, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number",
    list: "a list", dict: "an object", NoneType: "null",
}  # fmt: skip


class WrongField(UserError):
    """A field is unknown, missing or of the wrong type."""

    def __init__(
        self, name: str, message: str, *, hint: str | None = None, code: str = "invalid_value"
    ) -> None:
        super().__init__(message, hint=hint)
        self.name = name
        """The path of the field, such as `messages[0].role`."""
        self.code = code
        """OpenAI's error code."""


def parse(data: bytes) -> object:
    """Parse UTF-8 JSON, without duplicate names, non-finite numbers or lone surrogates.

    Raises:
        UserError: the bytes are anything else, nested too deeply, or have too many values.
    """
    check_shape(data)
    try:
        found: object = json.loads(
            data.decode(),
            object_pairs_hook=_once,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=_finite,
        )
        if b"\\u" in data:  # `"\ud800"` can be decoded but not encoded
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError("The JSON is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"Invalid JSON: {error}") from None
    return found


def build(
    kind: type[T],
    value: object,
    name: str = "",
    *,
    strict: bool = True,
    others: Iterable[str] = (),
) -> T:
    """Build a dataclass from the output of `parse`; raise `WrongField` if it does not match.

    An error about an unknown member names the ``others`` too, which are read elsewhere.
    """
    return cast("T", _Builder(strict, name, tuple(others)).build(kind, value, name))


def lay_out(value: object) -> Any:
    """Convert a dataclass to what `build` takes; floats are not rounded."""
    match value:
        case Span() | StrEnum():
            return str(value)
        case tuple():
            return [lay_out(each) for each in value]
        case dict():
            return {name: lay_out(each) for name, each in value.items()}
        case _ if is_dataclass(value):
            return {
                _called_in_json(each): lay_out(getattr(value, each.name)) for each in fields(value)
            }
        case _:
            return value


class _Member(NamedTuple):
    attribute: str
    kind: Any
    is_needed: bool


@dataclass(frozen=True, slots=True)
class _Builder:
    strict: bool
    top: str
    """The name of the whole value."""
    others: tuple[str, ...]
    """Of its members, those that are read elsewhere."""

    def build(self, kind: Any, value: object, name: str) -> object:
        if kind is object:
            return value
        if get_origin(kind) in {UnionType, Union}:  # the latter of a `Literal`
            return self.build(_alternative(kind, value, name), value, name)
        if _is_word(kind):
            return _word(kind, value, name, strict=self.strict)
        if not _fits(kind, value):
            raise _wrong(name, value, _called(kind))
        if isinstance(value, list):
            return self._tuple(get_args(kind), value, name)
        if isinstance(value, dict):
            return self._object(kind, value, name)
        return float(cast("float", value)) if kind is float else value

    def _tuple(self, kinds: Any, values: list[object], name: str) -> tuple[object, ...]:
        if kinds == (int, Ellipsis):
            return _whole_numbers(values, name)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(values)
        if len(values) != len(kinds):
            raise WrongField(name, f"`{name}` has {len(values)} items, not {len(kinds)}")
        if len(values) > MAX_ITEMS:
            raise WrongField(name, f"`{name}` has {len(values)} items, not at most {MAX_ITEMS}")
        items = enumerate(zip(kinds, values, strict=True))
        return tuple(self.build(kind, each, f"{name}[{place}]") for place, (kind, each) in items)

    def _object(self, kind: Any, values: dict[str, object], name: str) -> object:
        prefix = f"{name}." if name else ""
        if get_origin(kind) is dict:
            of = get_args(kind)[1]
            return {
                each: self.build(of, value, f"{prefix}{each}") for each, value in values.items()
            }
        members = _members(kind)
        asked = {each for each, value in values.items() if value is not None}
        for unknown in asked - members.keys() if self.strict else ():
            where = f"{prefix}{unknown[:100]}"
            hint = f"one of {_list((*members, *(self.others if name == self.top else ())))}"
            raise WrongField(
                where, f"`{where}` is not supported", hint=hint, code="unsupported_parameter"
            )
        for needed, member in members.items():
            if member.is_needed and needed not in values:
                where = f"{prefix}{needed}"
                raise WrongField(where, f"`{where}` is missing", code="missing_required_parameter")
        return kind(
            **{
                member.attribute: self.build(member.kind, values[each], f"{prefix}{each}")
                for each, member in members.items()
                if each in values
            }
        )


def _whole_numbers(values: list[object], name: str) -> tuple[object, ...]:
    """Read token ids, of which there may be a million: fifty times as fast as one by one."""
    for place, each in enumerate(values):
        if type(each) is not int:
            raise _wrong(f"{name}[{place}]", each, _WORDS[int])
    return tuple(values)


def _alternative(kind: Any, value: object, name: str) -> Any:
    """Return the first member of a union whose JSON type matches the value."""
    for each in get_args(kind):
        if _fits(each, value):
            return each
    raise _wrong(name, value, " or ".join(_called(each) for each in get_args(kind)))


def _word(kind: Any, value: object, name: str, *, strict: bool) -> object:
    """Read a `Literal`, an enumeration or a span."""
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    if kind is Span:
        return Span.parse(value[:100])
    words = get_args(kind) or tuple(kind)
    if value not in words:
        if not strict and get_origin(kind) is not Literal:
            return words[0]
        hint = f"one of {_list(words)}"
        raise WrongField(name, f"Invalid value `{value[:40]}` for `{name}`", hint=hint)
    return value if get_origin(kind) is Literal else kind(value)


@cache
def _members(kind: Any) -> dict[str, _Member]:
    """Return the members of a dataclass or a TypedDict by their names in JSON."""
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        needed = kind.__required_keys__
        return {name: _Member(name, hint, name in needed) for name, hint in hints.items()}
    return {
        _called_in_json(each): _Member(
            each.name, hints[each.name], each.default is each.default_factory is MISSING
        )
        for each in fields(kind)
    }


def _called_in_json(field: Field[Any]) -> str:
    return str(field.metadata.get("json", field.name))


def _fits(kind: Any, value: object) -> bool:
    """Return whether the JSON type of a value matches; nested values are not checked."""
    return type(value) is _form(kind) or (kind is float and type(value) is int)


def _is_word(kind: Any) -> bool:
    """Return whether an annotation is one of a `Literal`, an enumeration or a span."""
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    return kind is Span or get_origin(kind) is Literal or is_enum


def _form(kind: Any) -> type:
    """Return the type that `json` decodes for an annotation."""
    if _is_word(kind):
        return str
    if get_origin(kind) is tuple:
        return list
    is_object = is_dataclass(kind) or is_typeddict(kind) or get_origin(kind) is dict
    return dict if is_object else cast("type", kind)


def _called(kind: Any) -> str:
    return _WORDS[_form(kind)]


def _wrong(name: str, value: object, wanted: str) -> WrongField:
    subject = f"`{name}`" if name else "The JSON"
    message = f"{subject} is {_WORDS[type(value)]}, not {wanted}"
    return WrongField(name, message, code="invalid_type")


def _list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate name in an object")
    return found


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("a number that is not finite")
    return value
