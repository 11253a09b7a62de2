"""What a model's chat template shows: how it takes tools, how it writes calls and reasoning."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshllm.model.text.reasoning import ReasoningFormat
from meshllm.model.text.tool_format import Function, ToolFormat, instructions
from meshllm.request import Turn, openai_message
from meshllm.strict_json import WrongField

_ID_CHARS = 9  # letters and digits; Mistral's templates take nothing else


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """The properties of a chat template."""

    tool_format: ToolFormat = ToolFormat.JSON
    takes_tools: bool = False
    reasoning: ReasoningFormat | None = None
    takes_thinking: bool = False
    """The template can switch reasoning off."""
    takes_effort: bool = False
    """The template takes an effort of reasoning."""

    @classmethod
    def of(cls, template: str) -> "ChatStyle":
        """Recognise the style of a template; an empty one is that of a model without."""
        return cls(
            ToolFormat.of(template),
            "tools" in template,
            ReasoningFormat.of(template),
            "enable_thinking" in template,
            "reasoning_effort" in template,
        )

    def messages(
        self, turns: Sequence[Turn], functions: Sequence[Function]
    ) -> list[dict[str, Any]]:
        """Return turns as the template takes them.

        If it takes no tools, functions, calls and results become plain text.
        """
        if self.takes_tools:
            return [_message(each) for each in turns]
        plain = [_plain(each) for each in turns]
        if functions:
            text = instructions(functions)
            if plain[:1] and plain[0]["role"] == "system":
                first = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
                return [first, *plain[1:]]
            return [{"role": "system", "content": text}, *plain]
        return plain

    def options(
        self, functions: Sequence[Function], thinks: bool | None, effort: str | None
    ) -> dict[str, Any]:
        """Return what the template takes besides messages; raise `WrongField` for the rest."""
        options: dict[str, Any] = {}
        if functions and self.takes_tools:
            options["tools"] = [{"type": "function", "function": each.fields} for each in functions]
        if thinks is not None and self.takes_thinking:
            options["enable_thinking"] = thinks
        elif thinks and self.takes_effort:
            pass  # such a template has an effort of its own
        elif thinks is not None and thinks is not (self.reasoning is not None):
            text = "always reasons" if self.reasoning else "does not reason before its answers"
            raise WrongField("reasoning_effort", f"The model {text}")
        if effort is not None and self.takes_effort:
            options["reasoning_effort"] = effort
        return options


def _message(turn: Turn) -> dict[str, Any]:
    """Return a message of OpenAI's API, with arguments and ids as templates take them."""
    message = openai_message(turn)
    for call in message.get("tool_calls", ()):
        call["id"] = _short_id(call["id"])
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    return message


def _plain(turn: Turn) -> dict[str, Any]:
    text = turn["content"]
    if turn["role"] == "tool":
        return {"role": "user", "content": f"Result of the call: {text}"}
    calls = [
        json.dumps({"name": call.name, "arguments": _arguments(call.arguments)}, ensure_ascii=False)
        for call in turn.get("tool_calls", ())
    ]
    return {"role": turn["role"], "content": "\n".join([*([text] if text else []), *calls])}


def _arguments(text: str) -> object:
    """Return the arguments of a call, as most templates take them; invalid ones as they are."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _short_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_ID_CHARS]
