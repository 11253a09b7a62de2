"""Finds the tool calls in the text of an answer, as it is written.

Theory of operation
-------------------
Text before the first marker is content. A call is a JSON object: once ``{"name": "f", "arguments":
`` has arrived, with the name of a function that is offered, the object that follows is passed on
as it is written, up to its closing brace. An object with another order of its fields is parsed
when it is complete. What turns out to be no call is content, marker included: nothing of an answer
is lost, and its text depends on its tokens only, not on how they arrive.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshllm.model.text.detokenizer import overlap
from meshllm.model.text.tool_format import ARGS, CALLS, CLOSE, OPEN, PYTHON_TAG, ToolFormat
from meshllm.request import Piece, ToolCallDelta

_SPACE = " \t\r\n"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII
)
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_KEYS = {"name", "arguments", "parameters", "type", "function", "id"}
_NAME_END = re.compile(r"[^\w-]", re.ASCII)
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_END_PARAMETER = "</parameter>"
_PYTHON: dict[str, tuple[str, object]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
"""Values that templates, and so models, write as Python does, each with its type in a schema."""
_BETWEEN = _SPACE + ",;"
_MARKERS = (CLOSE, OPEN, CALLS, PYTHON_TAG)
_MAX_SKIPPED = 256  # characters of white space and punctuation between calls

Names = Mapping[str, Mapping[str, Any]]
"""The functions that are offered, and the JSON schemas of their arguments."""


class _NoCallError(ValueError):
    """The text is not a call."""


class ToolParser:
    """Splits the text of one answer into content and calls."""

    def __init__(self, form: ToolFormat, names: Names) -> None:
        """Begin an answer of a model that writes calls in a format."""
        self._form = form
        self._names = names
        self._held = ""  # text that may begin a call
        self._call: _JsonCall | None = None
        self._calls = 0
        self._opening = ""  # what was skipped before the call; content if there is no call
        self._is_between = not form.is_marked  # after a marker, or at the begin of the answer
        self._is_plain = False  # no more calls

    def push(self, text: str) -> Piece:
        """Append text; return the content and deltas that are now certain."""
        self._held += text
        content: list[str] = []
        deltas: list[ToolCallDelta] = []
        while self._step(content, deltas):
            pass
        return Piece("".join(content), calls=tuple(deltas))

    def finish(self) -> Piece:
        """Return what was held back; a call that is not complete is passed on as far as it is."""
        call, self._call = self._call, None
        if call and call.is_begun:
            return Piece("")
        rest = self._opening + (call.raw if call else "") + self._held
        self._opening = self._held = ""
        return Piece("" if self._is_end(rest) else rest)

    def _step(self, content: list[str], deltas: list[ToolCallDelta]) -> bool:
        """Consume held text; return whether there may be more to do."""
        if self._call:
            return self._continue(self._call, content, deltas)
        if self._is_plain:
            content.append(self._held)
            self._held = ""
            return False
        return self._begin(content) if self._is_between else self._find(content)

    def _find(self, content: list[str]) -> bool:
        """Look for a marker in content."""
        marker = self._form.marker
        before, found, after = self._held.partition(marker)
        if found:
            kept = before.rstrip(_SPACE)
            content.append(kept)
            self._opening, self._held = before[len(kept) :] + marker, after
            self._is_between = True
            return True
        kept = self._held.rstrip(_SPACE)
        kept = kept[: len(kept) - overlap(kept, (marker,))].rstrip(_SPACE)
        content.append(kept)
        self._held = self._held[len(kept) :]
        return False

    def _begin(self, content: list[str]) -> bool:
        """Look for a call after a marker, after a call, or where the answer begins."""
        if not self._skip_between():
            return False
        if len(self._opening) > _MAX_SKIPPED:
            return self._give_up(content)
        match self._form:
            case ToolFormat.ARGS if self._opening.endswith(CALLS):
                return self._begin_args(content)
            case ToolFormat.XML | ToolFormat.HERMES if self._is_xml():
                return self._take_xml(content)
        if self._held[0] != "{":
            return self._give_up(content)
        self._call = _JsonCall(self._calls, self._names)
        return True

    def _skip_between(self) -> bool:
        """Skip markers, white space and punctuation; return whether something else follows."""
        punctuation = f"{_BETWEEN}[]" if self._calls else f"{_BETWEEN}["
        while not any(each.startswith(self._held) for each in _MARKERS):
            marker = next((each for each in _MARKERS if self._held.startswith(each)), "")
            if not marker and self._held[0] not in punctuation:
                return True
            self._skip(len(marker) or 1)
        if self._held in _MARKERS:
            self._skip(len(self._held))
        return False

    def _skip(self, size: int) -> None:
        self._opening += self._held[:size]
        self._held = self._held[size:]

    def _give_up(self, content: list[str], raw: str = "") -> bool:
        """Return to content: with what was skipped, unless it only ends the calls."""
        opening, self._opening = self._opening, ""
        if raw or not self._is_end(opening):
            content.append(opening + raw)
        self._is_between = False
        self._is_plain = not self._form.is_marked
        return True

    def _is_end(self, text: str) -> bool:
        """Return whether text is what may follow the last call."""
        return self._calls > 0 and not text.replace(CLOSE, "").strip(f"{_BETWEEN}]")

    def _begin_args(self, content: list[str]) -> bool:
        """Look for ``name[ARGS]{``."""
        name, found, _ = self._held.partition(ARGS)
        if found and name in self._names:
            self._skip(len(name) + len(ARGS))
            self._call = _JsonCall(self._calls, self._names, name)
            return True
        if not found and ARGS.startswith(self._held[_word(self._held) :]):
            return False
        return self._give_up(content)

    def _is_xml(self) -> bool:
        return self._held.startswith(_FUNCTION) or _FUNCTION.startswith(self._held)

    def _take_xml(self, content: list[str]) -> bool:
        """Parse ``<function=name>...</function>`` once it is complete."""
        body, found, after = self._held.partition(_END_FUNCTION)
        if not found:
            return False
        name, _, inner = body.removeprefix(_FUNCTION).partition(">")
        if name not in self._names:
            return self._give_up(content)
        fields = self._names[name].get("properties")
        kinds = fields if isinstance(fields, dict) else {}
        given = {key: _value(value, kinds.get(key)) for key, value in _parameters(inner)}
        self._call = _JsonCall(self._calls, self._names, name)
        self._held = _dumped(given) + after
        return True

    def _continue(self, call: "_JsonCall", content: list[str], deltas: list[ToolCallDelta]) -> bool:
        """Pass the call on."""
        text, self._held = self._held, ""
        try:
            new, rest = call.push(text)
        except _NoCallError:
            self._call = None
            return self._give_up(content, call.raw)
        deltas += new
        if rest is None:
            return False
        self._call, self._held, self._opening = None, rest, ""
        self._calls += 1
        return True


class _JsonCall:
    """One call, as a JSON object that arrives piece by piece."""

    def __init__(self, index: int, names: Names, name: str = "") -> None:
        """Begin before the object; with ``name``, the object is that of the arguments."""
        self.raw = ""
        self.is_begun = False
        """A delta was returned."""
        self._index = index
        self._names = names
        self._name = name
        self._object = _Object()
        self._begin = 0  # of the arguments
        self._outer = _Object(depth=1)

    def push(self, text: str) -> tuple[list[ToolCallDelta], str | None]:
        """Append text; return deltas, and what is after the object once it is complete.

        Raises:
            _NoCallError: it is not a call; only before the first delta.
        """
        self.raw += text
        if not self._name:
            if found := _HEAD.match(self.raw):
                self._name, self._begin, self._object = found[1], found.end(), _Object()
                if self._name not in self._names:
                    raise _NoCallError
            else:
                return self._unordered()
        return self._arguments()

    def _arguments(self) -> tuple[list[ToolCallDelta], str | None]:
        """Pass the arguments on; wait for the end of the object that they are in, if any."""
        sent = self._begin + self._object.at
        end = self._object.scan(self.raw[self._begin :])
        arguments = self.raw[sent : self._begin + self._object.at]
        name, self.is_begun = "" if self.is_begun else self._name, True
        deltas = [ToolCallDelta(self._index, name, arguments)] if name or arguments else []
        if end is None or not self._begin:
            return deltas, None if end is None else self.raw[end:]
        rest = self.raw[self._begin + end :]
        closed = self._outer.scan(rest)
        return deltas, None if closed is None else rest[closed:]

    def _unordered(self) -> tuple[list[ToolCallDelta], str | None]:
        """Wait for the whole object, as long as it can be a call."""
        first = _FIRST_KEY.match(self.raw)
        if first and first[1] not in _KEYS:
            raise _NoCallError
        end = self._object.scan(self.raw)
        if end is None:
            return [], None
        name, arguments = _parsed(self.raw[:end])
        if name not in self._names:
            raise _NoCallError
        self.is_begun = True
        return [ToolCallDelta(self._index, name, arguments)], self.raw[end:]


class _Object:
    """Finds the end of a JSON object."""

    def __init__(self, depth: int = 0) -> None:
        self.at = 0
        """First character that is not scanned."""
        self._depth = depth
        self._is_string = False
        self._is_escaped = False
        self._end: int | None = None

    def scan(self, text: str) -> int | None:
        """Scan the object, with all text so far; return its end, None if it is not complete."""
        if self._end is not None:
            return self._end
        for place in range(self.at, len(text)):
            if self._is_closed_by(text[place]):
                self.at = self._end = place + 1
                return self._end
        self.at = len(text)
        return None

    def _is_closed_by(self, letter: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = letter == "\\"
            self._is_string = letter != '"'
        else:
            self._is_string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            return letter in "}]" and self._depth <= 0
        return False


def _parsed(raw: str) -> tuple[str, str]:
    """Return the name and the arguments of a call; raise `_NoCallError` if it is not a call."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise _NoCallError from None
    if isinstance(inner := found.get("function"), dict):
        found = inner
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(name, str) and isinstance(arguments, str):
        return name, arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise _NoCallError
    return name, _dumped(arguments)


def _dumped(arguments: Mapping[str, object]) -> str:
    """Return arguments as JSON, with escapes only for what UTF-8 cannot encode.

    Raises:
        _NoCallError: a number in them is not finite.
    """
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    except ValueError:
        raise _NoCallError from None
    return text


def _word(text: str) -> int:
    """Return the length of the function name with which a text begins."""
    found = _NAME_END.search(text)
    return found.start() if found else len(text)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Find the XML parameters of a call, each with its text, in one pass over all of them."""
    *parts, _ = text.split(_END_PARAMETER)
    for part in parts:
        if found := _PARAMETER.search(part):
            yield found[1], part[found.end() :].removesuffix("\n")


def _value(text: str, schema: object) -> object:
    """Return the value of an XML parameter: a text, unless its schema has only other types."""
    if not (kinds := _kinds(schema)) or "string" in kinds:
        return text
    if (found := _PYTHON.get(text.strip())) and found[0] in kinds:
        return found[1]
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _kinds(schema: object) -> set[str]:
    """Return the types that a schema names, each of its alternatives included."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    found = {each for each in names if isinstance(each, str)}
    for word in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(word), list):
            found = found.union(*map(_kinds, options))
    return found
