"""Short requests of the routes that answer, and the chunks of their streams."""

import json
from typing import Any

import httpx2

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
}
PATH = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "builtin", "messages": [HI]}
STREAM = BODY | {"stream": True}


def chunks_of(said: httpx2.Response) -> list[Any]:
    """Read server-sent events; the last of a whole stream is `[DONE]`."""
    data = [part.removeprefix("data: ") for part in said.text.split("\n\n") if part]
    return [json.loads(each) if each.startswith("{") else each for each in data]
