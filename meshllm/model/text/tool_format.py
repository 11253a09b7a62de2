"""How a model writes tool calls, recognised by its chat template, and the grammar of such calls.

========== ============================================================= ======================
format     an answer with a call                                         families
========== ============================================================= ======================
hermes     ``<tool_call>{"name": "f", "arguments": {}}</tool_call>``     Hermes, Qwen
xml        ``<tool_call><function=f><parameter=x>1</parameter>...``      Qwen Coder
mistral    ``[TOOL_CALLS][{"name": "f", "arguments": {}}]``              Mistral to v7
args       ``[TOOL_CALLS]f[ARGS]{}``                                     Mistral since v11
llama      ``{"name": "f", "parameters": {}}``                           Llama 3
json       ``{"name": "f", "arguments": {}}``                            all others
========== ============================================================= ======================
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshllm.request import Tools
from meshllm.strict_json import WrongField, parse

MAX_TOOLS = 128  # OpenAI API reference
MAX_TOOL_BYTES = 64 << 10

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
MARKERS = (OPEN, CLOSE, CALLS, ARGS, PYTHON_TAG)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")  # OpenAI allows 64, Anthropic 128
_COMPACT = {  # how models write JSON; endless white space would be valid, too
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}


class ToolFormat(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    XML = "xml"
    MISTRAL = "mistral"
    ARGS = "args"
    LLAMA = "llama"
    JSON = "json"

    @classmethod
    def of(cls, template: str) -> "ToolFormat":
        """Recognise the format by the chat template of a model."""
        if CALLS in template:
            return cls.ARGS if ARGS in template else cls.MISTRAL
        if OPEN in template:
            return cls.XML if "<function=" in template else cls.HERMES
        return cls.LLAMA if PYTHON_TAG in template else cls.JSON

    @property
    def is_marked(self) -> bool:
        """Whether a marker comes before a call, so that text may come before it."""
        return self not in {ToolFormat.LLAMA, ToolFormat.JSON}

    @property
    def marker(self) -> str:
        """The marker before calls."""
        return OPEN if self in {ToolFormat.HERMES, ToolFormat.XML} else CALLS


@dataclass(frozen=True, slots=True)
class Function:
    """A function that an answer may call."""

    name: str
    parameters: Mapping[str, Any]
    """A JSON schema of its arguments."""
    is_strict: bool
    fields: Mapping[str, Any]
    """The function object of OpenAI's API."""

    @classmethod
    def all_of(cls, tools: Tools) -> "tuple[Function, ...]":
        """Return the functions of a request; raise `WrongField` if they are malformed."""
        size = len(tools.functions.encode())
        if size > MAX_TOOL_BYTES:
            text = f"The tools have {size} bytes; the limit is {MAX_TOOL_BYTES}"
            raise WrongField("tools", text)
        found = parse(tools.functions.encode())
        if not isinstance(found, list) or not 0 < len(found) <= MAX_TOOLS:
            raise WrongField("tools", f"`tools` must be a list of 1 to {MAX_TOOLS} functions")
        functions = tuple(cls._of(fields, place) for place, fields in enumerate(found))
        if len({each.name for each in functions}) < len(functions):
            raise WrongField("tools", "Two functions of `tools` have one name")
        return functions

    @classmethod
    def _of(cls, fields: object, place: int) -> "Function":
        where = f"tools[{place}]"
        if not isinstance(fields, dict):
            raise WrongField(where, f"`{where}` is not a function")
        name, parameters = fields.get("name"), fields.get("parameters") or {}
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            text = f"The name of `{where}` must have 1 to 64 letters, digits, `_` or `-`"
            raise WrongField(where, text)
        if not isinstance(parameters, dict):
            raise WrongField(where, f"The parameters of `{where}` are not a JSON schema")
        return cls(name, parameters, fields.get("strict") is True, fields)


def call_grammar(tools: Tools, form: ToolFormat, special: Mapping[str, int]) -> str | None:
    """Return the Lark grammar that an answer has to follow, as llguidance reads it.

    It enforces required calls, and the arguments of strict functions wherever one is called; None
    if neither is asked for. ``special`` has the token ids of the markers that are one token.

    Raises:
        WrongField: strict functions, with markers that are not one token.
    """
    functions = Function.all_of(tools)
    if not tools.is_required and not any(each.is_strict for each in functions):
        return None

    def token(marker: str) -> str:
        return f"<[{special[marker]}]>" if marker in special else json.dumps(marker)

    rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(functions)))}"]
    for place, each in enumerate(functions):
        schema = {**_COMPACT, "type": "object", **each.parameters}
        rules += [
            f"call_{place}: {_call(each.name, f'args_{place}', form, token(ARGS))}",
            f"args_{place}: %json {json.dumps(schema)}",
        ]
    match form:
        case ToolFormat.HERMES | ToolFormat.XML:
            block, between = f'{token(OPEN)} "\\n" call "\\n" {token(CLOSE)}', '"\\n"'
        case ToolFormat.ARGS:
            block, between = f"{token(CALLS)} call", ""
        case _:
            block, between = "call", '", "'
    rules.append(f"block: {block}")
    has_many = tools.parallel and form.is_marked
    calls = f"block ({between} block)*" if has_many else "block"
    if form is ToolFormat.MISTRAL:
        calls = f'{token(CALLS)} "[" {calls} "]"'
    return "\n".join(["%llguidance {}", *_start(tools, form, calls, special), *rules])


def _start(tools: Tools, form: ToolFormat, calls: str, special: Mapping[str, int]) -> list[str]:
    """Return the rules of a whole answer: only calls, or else text, with calls after it."""
    if tools.is_required:
        return [f"start: {calls}"]
    if not form.is_marked:
        return [f"start: {calls} | OTHER", r"OTHER: /([^\[{\s](.|\n)*)?/"]
    if form.marker in special:  # it is not text
        return [f"start: TEXT ({calls})?", r"TEXT: /(.|\n)*/"]
    text = "`strict` requires `tool_choice` `required`, or a named function, on this model"
    raise WrongField("tools", text)


def _call(name: str, arguments: str, form: ToolFormat, separator: str) -> str:
    if form is ToolFormat.ARGS:
        return f"{json.dumps(name)} {separator} {arguments}"
    key = "parameters" if form is ToolFormat.LLAMA else "arguments"
    head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
    return f'{head} {arguments} "}}"'


def instructions(functions: Sequence[Function]) -> str:
    """Return a system text about the functions, for models whose chat template takes none."""
    listed = "\n".join(json.dumps(each.fields, ensure_ascii=False) for each in functions)
    return (
        f"You can call these functions:\n{listed}\n"
        'To call one, answer with JSON only: {"name": "...", "arguments": {...}}'
    )
