"""`/v1/embeddings`: OpenAI's embeddings, computed by the model that answers.

https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
import struct
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.failure import INVALID, JSON, Failure, Refused, compact, error_object
from meshllm.api.generation.extension import Needs, answer_as_needed, model_as_needed
from meshllm.api.generation.generating import read_fields
from meshllm.api.generation.headers import headers_of
from meshllm.api.generation.prompts import read_prompts, with_prompt
from meshllm.api.generation.service import IndexedEvent, Service
from meshllm.api.respond import Stream
from meshllm.request import Answer
from meshllm.request import Request as Asked
from meshllm.strict_json import WrongField

APART = ("input",)
"""Fields of a body that are read apart from `Embeddings`."""
HARMLESS = frozenset({"user"})
NEUTRAL: dict[str, tuple[object, ...]] = {}
MAX_INPUTS = 2048  # OpenAI API reference, as the next one
MAX_TOKENS = 300_000  # of all inputs of one request


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The body of a request but its input; null is the same as absent."""

    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    meshllm: Needs | None = None

    def request(self) -> Asked:
        """Return a request of the mesh but its prompt; raise `WrongField` if invalid."""
        if self.dimensions is not None and self.dimensions < 1:
            text = f"`dimensions` is {self.dimensions}, not at least 1"
            raise WrongField("dimensions", text)
        return Asked(max_tokens=0, embeds=True, dimensions=self.dimensions)


@dataclass(slots=True)
class _EmbeddingsReply:
    """Collects the embeddings of one reply, each as its JSON."""

    model: str
    is_base64: bool
    count: int
    tokens: int = 0
    _written: dict[int, bytes] = field(default_factory=dict)

    def write(self, news: IndexedEvent) -> bytes:
        """Write the reply once it is complete; no bytes before.

        Raises:
            Refused: there are too many tokens, or what answers computes no embeddings.
        """
        place, happened = news
        if not isinstance(happened, Answer):
            return b""
        if not happened.embedding:
            text = f"The backend of `{self.model}` does not compute embeddings"
            raise Refused(text, Failure(400, INVALID, "unsupported_model", "model"))
        self.tokens += happened.prompt_tokens
        if self.tokens > MAX_TOKENS:
            text = f"All inputs together have more than {MAX_TOKENS} tokens"
            raise Refused(text, Failure(400, INVALID, "max_tokens_per_request", "input"))
        self._written[place] = self._item(place, happened.embedding)
        return self._whole() if len(self._written) == self.count else b""

    def _item(self, place: int, embedding: str) -> bytes:
        value = embedding if self.is_base64 else numbers(embedding)
        return compact({"object": "embedding", "index": place, "embedding": value})

    def _whole(self) -> bytes:
        data = b",".join(self._written[place] for place in range(self.count))
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        rest = compact({"model": self.model, "usage": usage})
        return b'{"object":"list","data":[' + data + b"]," + rest[1:]


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def embed(request: Request) -> Response:
        body, apart = await read_fields(service, request, Embeddings, APART, HARMLESS, NEUTRAL)
        common = body.request()
        inputs = read_prompts(apart.get("input"), "input", MAX_INPUTS)
        key = key_of(request)
        asked = [with_prompt(common, each) for each in inputs]
        model = await model_as_needed(service, key, body.model, asked, body.meshllm)
        reply = _EmbeddingsReply(model.name, body.encoding_format == "base64", len(asked))
        events = answer_as_needed(service, key, model, asked, body.meshllm)
        headers = headers_of(model)
        return Stream(events, JSON, reply.write, error_object, headers)

    return [Route("/v1/embeddings", embed, methods=["POST"])]


def numbers(embedding: str) -> list[float]:
    """Return the values of an embedding, with the nine digits that tell a float32."""
    data = base64.b64decode(embedding)
    values = struct.unpack(f"<{len(data) // 4}f", data)
    return [float(f"{value:.9g}") for value in values]
