"""Anthropic's own library for Python."""

from typing import Any

import anthropic
from calls import run

MODEL = "builtin"
ASKED = "What is a ring?"
GREEDY = {"temperature": 0}

client: Any = anthropic.Anthropic(max_retries=0)


def message() -> None:
    reply = ask()
    assert reply.content[0].text.startswith("A ring is")
    assert (reply.role, reply.stop_reason) == ("assistant", "end_turn")
    assert reply.usage.output_tokens > 0


def blocks() -> None:
    content = [{"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}]
    turns = [{"role": "user", "content": content}]
    assert ask(messages=turns).content[0].text == ask().content[0].text


def stream() -> None:
    turns = [{"role": "user", "content": ASKED}]
    asked = {"model": MODEL, "max_tokens": 100, "messages": turns, "extra_body": GREEDY}
    with client.messages.stream(**asked) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == final.content[0].text == ask().content[0].text
    assert final.usage.output_tokens > 0


def ends() -> None:
    assert ask(max_tokens=3).stop_reason == "max_tokens"
    word = ask().content[0].text.split()[3]
    reply = ask(stop_sequences=[word])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", word)


def count() -> None:
    turns = [{"role": "user", "content": ASKED}]
    counted = client.messages.count_tokens(model=MODEL, messages=turns).input_tokens
    usage = ask().usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def tools() -> None:
    city = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    wanted = {
        "tools": [{"name": "weather", "input_schema": schema}],
        "tool_choice": {"type": "any"},
    }
    reply = ask(**wanted)
    (call,) = reply.content
    assert (reply.stop_reason, call.name, call.input.keys()) == ("tool_use", "weather", {"city"})
    turns = [{"role": "user", "content": ASKED}]
    asked = {"model": MODEL, "max_tokens": 100, "messages": turns, "extra_body": GREEDY}
    with client.messages.stream(**asked, **wanted) as events:
        (same,) = events.get_final_message().content
    assert same.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    answer = {"role": "assistant", "content": reply.content}
    assert ask(messages=[*turns, answer, {"role": "user", "content": [result]}]).content


def errors() -> None:
    for wrong, kind in (
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError),
    ):
        told = refusal(wrong, kind).body
        assert told["type"] == "error", told


def refusal(wrong: dict[str, Any], kind: type[Exception]) -> Any:
    """Return the error with which a request is refused."""
    try:
        ask(**wrong)
    except kind as error:
        return error
    raise AssertionError(f"{wrong} is not refused")


def ask(**more: Any) -> Any:
    turns = [{"role": "user", "content": ASKED}]
    asked = {"model": MODEL, "messages": turns, "max_tokens": 100, "extra_body": GREEDY}
    return client.messages.create(**asked | more)


if __name__ == "__main__":
    run(message, blocks, stream, ends, count, tools, errors)
