"""LangChain's `ChatOpenAI` and `OpenAIEmbeddings`."""

import asyncio
from typing import Any

from calls import run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

ASKED = "What is a ring?"
SCHEMA = {
    "title": "animal",
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "cow"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def invoke() -> None:
    reply = model().invoke(ASKED)
    assert reply.content.startswith("A ring is")
    assert reply.usage_metadata["output_tokens"] > 0
    assert reply.response_metadata["finish_reason"] == "stop"


def stream() -> None:
    chunks = list(model(stream_usage=True).stream(ASKED))
    assert "".join(each.content for each in chunks) == model().invoke(ASKED).content
    counted = [each.usage_metadata for each in chunks if each.usage_metadata]
    assert len(counted) == 1, "usage must be counted once"


def batch() -> None:
    first, second = model().batch([ASKED, "What is a node?"])
    assert first.content.startswith("A ring is")
    assert second.content != first.content


def asynchronous() -> None:
    reply = asyncio.run(model().ainvoke(ASKED))
    assert reply.content.startswith("A ring is")


def responses() -> None:
    reply = model(use_responses_api=True).invoke(ASKED)
    assert reply.text.startswith("A ring is")


def structured() -> None:
    asking = model().with_structured_output(SCHEMA, method="json_schema", strict=True)
    told = asking.invoke("Which animal?")
    assert told["animal"] in {"fox", "cow"}


def tools() -> None:
    bound = model(seed=1).bind_tools([WEATHER], tool_choice="weather")
    reply = bound.invoke("What is the weather?")
    (call,) = reply.tool_calls
    assert (call["name"], call["args"].keys()) == ("weather", {"city"})
    turns = [
        HumanMessage("What is the weather?"),
        reply,
        ToolMessage("sunny", tool_call_id=call["id"]),
    ]
    assert model().bind_tools([WEATHER]).invoke(turns).response_metadata["finish_reason"]


def embeddings() -> None:
    # By default it sends token ids of OpenAI's tokenizer, which it would have to download.
    maker = OpenAIEmbeddings(model="builtin", check_embedding_ctx_length=False)
    first, second = maker.embed_documents([ASKED, "What is a node?"])
    assert len(first) == len(second)
    assert first != second


def model(**more: Any) -> Any:
    return ChatOpenAI(model="builtin", temperature=0, max_retries=0, **more)


if __name__ == "__main__":
    run(invoke, stream, batch, asynchronous, responses, structured, tools, embeddings)
