"""litellm, which translates between providers."""

import asyncio
from typing import Any

import litellm
from calls import run

MODEL = "openai/builtin"
ASKED = "What is a ring?"


def chat() -> None:
    reply = ask(temperature=0)
    assert reply.choices[0].message.content.startswith("A ring is")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def stream() -> None:
    chunks = list(ask(temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == ask(temperature=0).choices[0].message.content
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens > 0


def asynchronous() -> None:
    reply = asyncio.run(litellm.acompletion(**asked(temperature=0)))
    assert reply.choices[0].message.content.startswith("A ring is")


def completion() -> None:
    reply = litellm.text_completion(
        model="text-completion-openai/builtin", prompt="Once upon a time", max_tokens=4
    )
    assert reply.choices[0].text


def responses() -> None:
    reply: Any = litellm.responses(model=MODEL, input=ASKED, temperature=0)
    text = reply.output[0].content[0].text
    assert text.startswith("A ring is"), text


def embeddings() -> None:
    reply = litellm.embedding(model=MODEL, input=[ASKED, "What is a node?"])
    assert len(reply.data) == 2
    assert reply.data[0]["embedding"] != reply.data[1]["embedding"]


def tools() -> None:
    city = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    (call,) = ask(tools=[tool], tool_choice="required", seed=1).choices[0].message.tool_calls
    assert call.function.name == "weather"


def errors() -> None:
    for wrong, kind in (
        ({"model": "openai/gpt-5"}, litellm.NotFoundError),
        ({"messages": [{"role": "user", "content": "ring " * 20_000}]},
         litellm.ContextWindowExceededError),
        ({"temperature": -1.0}, litellm.BadRequestError),
    ):  # fmt: skip
        try:
            ask(**wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} is not refused")


def asked(**more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": ASKED}]
    return {"model": MODEL, "messages": turns, "num_retries": 0} | more


def ask(**more: Any) -> Any:
    return litellm.completion(**asked(**more))


if __name__ == "__main__":
    run(chat, stream, asynchronous, completion, responses, embeddings, tools, errors)
