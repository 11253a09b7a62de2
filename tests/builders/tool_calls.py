"""Answers with reasoning and tool calls, and requests that allow them."""

from dataclasses import replace
from typing import Any

from meshllm.request import Event, Piece, ToolCall, ToolCallDelta
from tests.builders.fake_ring import answer_of

FUNCTION: dict[str, Any] = {"name": "f", "parameters": {}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
MESSAGES_TOOL = {"name": "f", "input_schema": {}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ONE_CALL: tuple[Event, ...] = (
    Piece("", reasoning="Hm."),
    Piece("I see."),
    Piece("", calls=(ToolCallDelta(0, "f", '{"x"'),)),
    Piece("", calls=(ToolCallDelta(0, arguments=": 1}"),)),
    replace(
        answer_of("I see.", 5),
        reasoning="Hm.",
        reasoning_tokens=2,
        calls=(ToolCall("f", '{"x": 1}'),),
    ),
)
