"""OpenAI's own library for Python."""

import json
from typing import Any

import openai
from calls import run

MODEL = "builtin"
ASKED = "What is a ring?"
STORY = "Once upon a time there was a fox."

client: Any = openai.OpenAI(max_retries=0)


def models() -> None:
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "meshllm"


def chat() -> None:
    reply = ask(temperature=0)
    assert reply.choices[0].message.content.startswith("A ring is")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.system_fingerprint.startswith("fp_")


def seeds() -> None:
    first = ask(temperature=1.5)
    again = ask(temperature=1.5, seed=first.meshllm["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def stream() -> None:
    chunks = list(ask(stream=True, temperature=0, stream_options={"include_usage": True}))
    text = "".join(each.choices[0].delta.content or "" for each in chunks[:-1])
    assert text == ask(temperature=0).choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens > 0) == ([], True)


def stream_helper() -> None:
    turns = [{"role": "user", "content": ASKED}]
    with client.chat.completions.stream(model=MODEL, messages=turns, temperature=0) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content.startswith("A ring is")


def choices() -> None:
    reply = ask(n=3, seed=5, temperature=1.2, max_completion_tokens=12)
    assert [each.index for each in reply.choices] == [0, 1, 2]
    second = ask(seed=6, temperature=1.2, max_completion_tokens=12)
    assert reply.choices[1].message.content == second.choices[0].message.content


def logprobs() -> None:
    told = ask(logprobs=True, top_logprobs=5, temperature=0).choices[0].logprobs.content
    assert all(len(each.top_logprobs) == 5 for each in told)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in told)


def completion() -> None:
    reply = client.completions.create(
        model=MODEL, prompt=[STORY, "A"], max_tokens=4, temperature=0, n=2
    )
    assert [each.index for each in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].text == reply.choices[1].text


def scored_prompt() -> None:
    reply = client.completions.create(
        model=MODEL, prompt=STORY, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    (choice,) = reply.choices
    told = choice.logprobs
    assert choice.text == STORY
    assert told.token_logprobs[0] is None
    assert all(value < 0 for value in told.token_logprobs[1:])
    assert len(told.tokens) == reply.usage.prompt_tokens
    assert reply.usage.completion_tokens == 0


def embeddings() -> None:
    texts = [STORY, "Once upon a time there was a cow."]
    reply = client.embeddings.create(model=MODEL, input=texts)  # the library asks for base64
    first, second = (each.embedding for each in reply.data)
    assert abs(sum(each * each for each in first) - 1) < 1e-5
    assert first != second
    asked = {"model": MODEL, "input": STORY, "encoding_format": "float"}
    short = client.embeddings.create(**asked, dimensions=16)
    assert len(short.data[0].embedding) == 16 < len(first)
    assert short.usage.prompt_tokens == short.usage.total_tokens > 0


def structured() -> None:
    legs = {"type": "integer", "minimum": 0, "maximum": 8}
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "cow"]}, "legs": legs},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    told = json.loads(ask(response_format=form).choices[0].message.content)
    assert told["animal"] in {"fox", "cow"}
    assert told["legs"] in range(9)
    reply = ask(response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert reply.finish_reason == "length" or isinstance(json.loads(reply.message.content), dict)


def tools() -> None:
    city = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    wanted = {"tools": [tool], "tool_choice": "required", "seed": 1}
    choice = ask(**wanted).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments).keys()) == ("weather", {"city"})
    chunks = [each.choices[0].delta for each in ask(**wanted, stream=True)]
    deltas = [delta for each in chunks for delta in each.tool_calls or ()]
    assert "".join(each.function.arguments for each in deltas) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    question = {"role": "user", "content": "What is the weather?"}
    reply = ask(messages=[question, choice.message, result], tools=[tool])
    assert reply.choices[0].finish_reason in {"stop", "length"}


def responses_tools() -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "name": "now", "parameters": nothing, "strict": False}
    asked = {"model": MODEL, "input": ASKED, "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**asked) as events:
        kinds = {event.type for event in events}
        (call,) = events.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert (call.type, call.name) == ("function_call", "now")


def responses() -> None:
    asked = {"model": MODEL, "temperature": 0}
    first = client.responses.create(**asked, input=ASKED, instructions="Be brief.")
    assert first.output_text.startswith("A ring is")
    assert (first.status, first.usage.output_tokens > 0) == ("completed", True)
    again = client.responses.create(**asked, input="Why?", previous_response_id=first.id)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with client.responses.stream(**asked, input=ASKED, store=False) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert "response.output_text.delta" in kinds
    assert final.output_text.startswith("A ring is")


def errors() -> None:
    for wrong, kind, code in (
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_value"),
        ({"temperature": "hot"}, openai.BadRequestError, "invalid_type"),
        ({"extra_body": {"unheard_of": 1}}, openai.BadRequestError, "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "ring " * 20_000}]},
         openai.BadRequestError, "context_length_exceeded"),
    ):  # fmt: skip
        told = refusal(wrong, kind)
        assert (told.code, told.type) == (code, "invalid_request_error"), told


def refusal(wrong: dict[str, Any], kind: type[Exception]) -> Any:
    """Return the error with which a request is refused."""
    try:
        ask(**wrong)
    except kind as error:
        return error
    raise AssertionError(f"{wrong} is not refused")


def ask(**more: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}]}
    return client.chat.completions.create(**asked | more)


if __name__ == "__main__":
    run(
        models,
        chat,
        seeds,
        stream,
        stream_helper,
        choices,
        logprobs,
        completion,
        scored_prompt,
        embeddings,
        structured,
        tools,
        responses,
        responses_tools,
        errors,
    )
