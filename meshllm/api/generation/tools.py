"""The tools of a request in the three dialects, as functions that an answer may call."""

import json
import secrets
from typing import Any

from meshllm.model.text.tool_format import Function
from meshllm.request import Tools
from meshllm.strict_json import WrongField

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
"""Fields of OpenAI's requests that `tools_of` reads."""
_KNOWN = {"name", "description", "parameters", "strict"}
_KNOWN_BY_ANTHROPIC = {"name", "description", "input_schema", "cache_control", "type", "strict"}


def new_call_id() -> str:
    """Return an id for a call."""
    return f"call_{secrets.token_hex(12)}"


def tools_of(given: dict[str, object], *, is_flat: bool = False) -> Tools | None:
    """Return the tools of chat completions, or with ``is_flat`` those of responses.

    None if there are none, or `tool_choice` is `none`.

    Raises:
        WrongField: they are malformed, or ask for what is not supported.
    """
    listed, choice = given.get("tools"), given.get("tool_choice")
    functions = [
        _function(each, f"tools[{place}]", is_flat=is_flat)
        for place, each in enumerate(_list(listed))
    ]
    parallel = given.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise WrongField("parallel_tool_calls", "`parallel_tool_calls` must be true or false")
    named: str | None = None
    match choice:
        case None | "auto" | "none" | "required":
            pass
        case {"type": "function", "function": {"name": str() as name, **more}, **rest} if not (
            is_flat or more or rest
        ):
            named = name
        case {"type": "function", "name": str() as name, **rest} if is_flat and not rest:
            named = name
        case _:
            text = "`tool_choice` is not `none`, `auto`, `required` or a function"
            raise WrongField("tool_choice", text)
    return _tools(
        functions,
        named,
        is_none=choice == "none",
        is_required=choice == "required",
        parallel=parallel is not False,
    )


def tools_of_messages(listed: object, choice: object) -> Tools | None:
    """Return the tools of Anthropic's messages, as `tools_of` does."""
    functions = [
        _anthropic_function(each, f"tools[{place}]") for place, each in enumerate(_list(listed))
    ]
    choice = {"type": "auto"} if choice is None else choice
    fields = dict(choice) if isinstance(choice, dict) else {}
    is_single, named = fields.pop("disable_parallel_tool_use", None) is True, None
    kind, name = fields.pop("type", None), fields.pop("name", None)
    if kind == "tool" and isinstance(name, str):
        kind, named, name = "any", name, None
    if fields or name is not None or kind not in ("auto", "any", "none"):  # it may be a list
        text = "`tool_choice` is not of type `auto`, `any`, `none`, or `tool` with a name"
        raise WrongField("tool_choice", text)
    return _tools(
        functions,
        named,
        is_none=kind == "none",
        is_required=kind == "any",
        parallel=not is_single,
    )


def _tools(
    functions: list[dict[str, Any]],
    named: str | None,
    *,
    is_none: bool,
    is_required: bool,
    parallel: bool,
) -> Tools | None:
    if (is_required or named is not None) and not functions:
        raise WrongField("tool_choice", "`tool_choice` requires `tools`")
    if named is not None:
        functions = [each for each in functions if each.get("name") == named]
        if not functions:
            text = f"`tool_choice` names `{named[:64]}`, which is not in `tools`"
            raise WrongField("tool_choice", text)
        parallel = False
    if is_none or not functions:
        return None
    text = json.dumps(functions, ensure_ascii=False, separators=(",", ":"))
    tools = Tools(text, is_required or named is not None, parallel)
    Function.all_of(tools)  # what is wrong is refused before a ring is asked
    return tools


def _list(listed: object) -> list[Any]:
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise WrongField("tools", "`tools` is not a list")
    return listed


def _function(given: object, where: str, *, is_flat: bool) -> dict[str, Any]:
    fields = dict(given) if isinstance(given, dict) else {}
    if fields.pop("type", None) == "function":
        if is_flat:
            return _checked(fields, where, _KNOWN)
        inner = fields.pop("function", None)
        if isinstance(inner, dict) and not fields:
            return _checked(inner, f"{where}.function", _KNOWN)
    raise WrongField(where, f"`{where}` is not a function: other tools are not supported")


def _anthropic_function(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type", "custom") not in ("custom", None):
        raise WrongField(where, f"`{where}` is not a custom tool: others are not supported")
    found = _checked(given, where, _KNOWN_BY_ANTHROPIC)
    schema = found.pop("input_schema", {})
    kept = {key: value for key, value in found.items() if key in _KNOWN}
    return {**kept, "parameters": schema}


def _checked(function: dict[str, Any], where: str, known: set[str]) -> dict[str, Any]:
    found = {key: value for key, value in function.items() if value is not None}
    if unknown := found.keys() - known:
        name = f"{where}.{min(unknown)}"[:100]
        raise WrongField(name, f"`{name}` is not supported")
    if not isinstance(found.get("description", ""), str):
        raise WrongField(f"{where}.description", f"`{where}.description` must be a text")
    if not isinstance(found.get("strict", False), bool):
        raise WrongField(f"{where}.strict", f"`{where}.strict` must be true or false")
    return found
