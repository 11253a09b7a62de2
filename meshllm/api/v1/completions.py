"""`/v1/completions`: OpenAI's text completions, which score prompts with `echo` and `logprobs`."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.failure import JSON, error_object
from meshllm.api.generation.extension import Needs, answer_as_needed, model_as_needed
from meshllm.api.generation.generating import GenerationFields, read_fields, variants
from meshllm.api.generation.headers import headers_of, is_traced
from meshllm.api.generation.prompts import read_prompts, with_prompt
from meshllm.api.generation.reply import EventStream, Reply, failure, reason
from meshllm.api.generation.service import IndexedEvent, Service
from meshllm.api.respond import Stream
from meshllm.request import Answer, Logprob, Piece, TokenLogprobs
from meshllm.request import Request as Asked
from meshllm.strict_json import WrongField

APART = ("prompt",)
"""Fields of a body that are read apart from `Completion`."""
KIND = "text_completion"
MAX_PROMPTS = 256  # of one request
MAX_ANSWERS = 256  # of one request, over all prompts
DEFAULT_MAX_TOKENS = 16  # OpenAI API reference
MAX_LOGPROBS = 20  # the same as `top_logprobs` of a chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(GenerationFields):
    """The body of a request but its prompt; null is the same as absent."""

    echo: bool | None = None
    logprobs: int | None = None
    ignore_eos: bool | None = None
    meshllm: Needs | None = None

    def requests(self, prompts: Sequence[str | tuple[int, ...]]) -> list[Asked]:
        """Convert to requests of the mesh, ``n`` for each prompt; raise `WrongField` if invalid."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if limit < (0 if self.echo else 1):
            least = "0 with `echo`, and 1 without"
            raise WrongField("max_tokens", f"`max_tokens` is {limit}, not at least {least}")
        if len(prompts) * self.choices > MAX_ANSWERS:
            text = f"{len(prompts)} prompts with `n` of {self.choices}: more than {MAX_ANSWERS}"
            raise WrongField("n", f"{text} answers")
        if not 0 <= (self.logprobs or 0) <= MAX_LOGPROBS:
            text = f"`logprobs` is {self.logprobs}, not between 0 and {MAX_LOGPROBS}"
            raise WrongField("logprobs", text)
        common = replace(
            self.request(limit),
            logprobs=self.logprobs,
            scores_prompt=bool(self.echo),
            ignores_end=bool(self.ignore_eos),
        )
        return [
            each
            for prompt in prompts
            for each in variants(with_prompt(common, prompt), self.choices)
        ]


@dataclass(slots=True)
class _TextOffsets:
    """Counts the characters of tokens, of which one may have a part of a character."""

    count: int = 0
    _decoder: IncrementalDecoder = field(
        default_factory=lambda: getincrementaldecoder("utf-8")("replace")
    )

    def add(self, token: Logprob) -> int:
        """Add a token; return the offset of its text, or of the character that it continues."""
        offset = self.count
        self.count += len(self._decoder.decode(bytes(token.bytes)))
        return offset


@dataclass(slots=True)
class _TextReply(Reply):
    """Writes the JSON objects of a text completion."""

    texts: dict[int, "_TextOffsets"] = field(default_factory=dict)
    """Of each choice whose log probabilities have begun, those that they cover."""

    def completion(self, news: IndexedEvent) -> bytes:
        """Write the completion once it is complete; no bytes before."""
        place, happened = news
        if isinstance(happened, Piece) and happened.logprobs:
            scores = self._logprobs(place, happened.logprobs)
            self.choices[place].logprobs.add(scores)
        if not self._take(news) or not self.is_complete:
            return b""
        return self.whole(KIND, map(self._whole, range(len(self.choices))))

    def chunks(self, news: IndexedEvent) -> bytes:
        """Write server-sent events, nothing for progress."""
        place, happened = news
        if isinstance(happened, Piece) and (happened.text or happened.logprobs):
            scores = self._logprobs(place, happened.logprobs) if happened.logprobs else None
            return self.chunk(KIND, [_choice(place, happened.text, scores, None)])
        if not self._take(news):
            return b""
        answer = self.choices[place].answer
        assert answer  # just taken
        end = self.chunk(KIND, [_choice(place, "", None, reason(answer))])
        return end + (self.end(KIND) if self.is_complete else b"")

    def _take(self, news: IndexedEvent) -> bool:
        """Take an event; return whether it completes a choice."""
        place, happened = news
        if isinstance(happened, Answer):
            self.choices[place].answer = happened
        return isinstance(happened, Answer)

    def _whole(self, place: int) -> bytes:
        choice, answer = self.choices[place], self.choices[place].answer
        assert answer  # the reply is complete
        choice.logprobs.add(self._logprobs(place, ()))  # if there are none
        fields = {"index": place, "text": answer.text, "finish_reason": reason(answer)}
        return self.choice(place, fields)

    def _logprobs(self, place: int, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Lay out log probabilities; the first token of an echoed prompt has none."""
        asked, is_first = self.asked[place], place not in self.texts
        if asked.logprobs is None:
            return None
        text = self.texts.setdefault(place, _TextOffsets())
        offsets = [text.add(each.chosen) for each in found]
        values: list[float | None] = [each.chosen.logprob for each in found]
        tops: list[dict[str, float] | None] = [_top(each) for each in found]
        if is_first and asked.scores_prompt and found:
            values[0] = tops[0] = None
        return {
            "tokens": [each.chosen.text for each in found],
            "token_logprobs": values,
            "top_logprobs": tops if asked.logprobs else None,
            "text_offset": offsets,
        }


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def complete(request: Request) -> Response:
        body, apart = await read_fields(service, request, Completion, APART)
        prompts = read_prompts(apart.get("prompt"), "prompt", MAX_PROMPTS)
        asked, key = body.requests(prompts), key_of(request)
        model = await model_as_needed(service, key, body.model, asked, body.meshllm)
        head = (model.name, model.fingerprint, asked, body.choices, body.has_usage)
        reply = _TextReply("cmpl", *head, is_traced(request))
        events = answer_as_needed(service, key, model, asked, body.meshllm)
        headers = headers_of(model)
        if body.stream:
            return EventStream(events, reply.chunks, failure, headers)
        return Stream(events, JSON, reply.completion, error_object, headers)

    return [Route("/v1/completions", complete, methods=["POST"])]


def _choice(
    place: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {
        "index": place, "text": text, "logprobs": logprobs, "finish_reason": finish_reason
    }  # fmt: skip


def _top(found: TokenLogprobs) -> dict[str, float]:
    """Return the likeliest tokens by their text; of those with one text, the likeliest."""
    return {each.text: each.logprob for each in (found.chosen, *reversed(found.top))}
