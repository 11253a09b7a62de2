"""What the replies of chat and text completions share: choices, chunks and usage."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshllm.api.failure import compact, error_object
from meshllm.api.generation.headers import trace_of
from meshllm.api.generation.service import IndexedEvent
from meshllm.api.respond import Stream
from meshllm.errors import MeshError
from meshllm.log import escape
from meshllm.request import Answer, FinishReason, Waiting
from meshllm.request import Request as Asked

PATIENCE = b": patience\n\n"  # a comment, which clients ignore
DONE = b"data: [DONE]\n\n"
STREAM = "text/event-stream"
MAX_COMMENT_CHARS = 1000


@dataclass(slots=True)
class WrittenLists:
    """JSON of an object whose lists grow, written as they do: all at once would take seconds."""

    rest: dict[str, object] = field(default_factory=dict)
    lists: dict[str, list[bytes]] = field(default_factory=dict)

    def add(self, fields: Mapping[str, object] | None) -> None:
        """Append to each list; the other fields are those of the latest."""
        for name, value in (fields or {}).items():
            if not isinstance(value, list):
                self.rest[name] = value
                continue
            written = self.lists.setdefault(name, [])
            if value:
                written.append(compact(value)[1:-1])

    def write(self) -> bytes:
        """Write the object; null if nothing was added."""
        fields = [compact(self.rest)[1:-1]] if self.rest else []
        for name, written in self.lists.items():
            fields.append(b'"' + name.encode() + b'":[' + b",".join(written) + b"]")
        return b"{" + b",".join(fields) + b"}" if fields else b"null"


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has come."""

    is_begun: bool = False
    """Its first chunk is written."""
    logprobs: WrittenLists = field(default_factory=WrittenLists)
    """For a reply that is not streamed."""
    answer: Answer | None = None


@dataclass(slots=True)
class Reply:
    """The head and the usage of the JSON objects of one reply."""

    prefix: str
    """Of the id."""
    model: str
    fingerprint: str
    asked: Sequence[Asked]
    """One for each choice."""
    per_prompt: int
    """Choices of one prompt, which follow each other."""
    has_usage: bool
    is_traced: bool = False
    """Whether the last object says where the time went."""
    choices: list[Choice] = field(init=False)
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.choices = [Choice() for _ in self.asked]

    @property
    def is_complete(self) -> bool:
        """Whether every choice has its answer."""
        return all(each.answer for each in self.choices)

    def write(self, kind: str, choices: list[dict[str, Any]], **more: object) -> bytes:
        """Write one JSON object."""
        return compact(self._fields(kind, **more, choices=choices))

    def whole(self, kind: str, choices: Iterable[bytes]) -> bytes:
        """Write the object of a reply that is not streamed, of choices that are written."""
        rest = compact(self._fields(kind, usage=self.usage()))
        return rest[:-1] + b',"choices":[' + b",".join(choices) + b"]}"

    def choice(self, place: int, fields: Mapping[str, object]) -> bytes:
        """Write a choice of it with its log probabilities."""
        logprobs = self.choices[place].logprobs.write()
        return compact(fields)[:-1] + b',"logprobs":' + logprobs + b"}"

    def _fields(self, kind: str, **more: object) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint or None,
            **more,
            "meshllm": {"seed": self.asked[0].sampling.seed, **self._trace()},
        }

    def _trace(self) -> dict[str, Any]:
        """Return the times of the answers, once all are complete and if they are asked for."""
        is_told = self.is_traced and self.is_complete
        return {"trace": trace_of([each.answer for each in self.choices])} if is_told else {}

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> bytes:
        """Write one chunk; with usage requested, all but the last say that it is not known yet."""
        return event(self.write(kind, choices, **({"usage": None} if self.has_usage else {})))

    def end(self, kind: str) -> bytes:
        """Write what ends a stream."""
        usage = event(self.write(kind, [], usage=self.usage())) if self.has_usage else b""
        return usage + DONE

    def usage(self) -> dict[str, Any]:
        """Return the tokens that were used; a prompt counts once, however many its answers."""
        answers = [each.answer for each in self.choices if each.answer]
        read = sum(each.prompt_tokens for each in answers[:: self.per_prompt])
        cached = sum(each.cached_tokens for each in answers[:: self.per_prompt])
        written = sum(map(Answer.written_for, answers, self.asked))
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(each.reasoning_tokens for each in answers)
            },
        }


class EventStream(Stream[IndexedEvent]):
    """Streams the events of answers as server-sent events.

    In silence it sends ``idle``, or while a request waits, a comment on what for.
    """

    def __init__(
        self,
        events: AsyncGenerator[IndexedEvent, None],
        write: Callable[[IndexedEvent], bytes],
        fail: Callable[[MeshError], bytes],
        headers: Mapping[str, str],
        idle: bytes = PATIENCE,
    ) -> None:
        super().__init__(events, STREAM, self._written, fail, headers, self._kept)
        self._write, self._idle, self._reason = write, idle, ""

    def _written(self, news: IndexedEvent) -> bytes:
        match news:
            case _, Waiting(reason):
                self._reason = reason
                return b""
        self._reason = ""
        return self._write(news)

    def _kept(self) -> bytes:
        return comment(f"waiting: {self._reason}") if self._reason else self._idle


def comment(text: str) -> bytes:
    """Write a comment, which clients ignore; names that peers chose cannot end its line."""
    line = escape(text[:MAX_COMMENT_CHARS]).replace("\n", " ")
    return f": {line}\n\n".encode(errors="replace")


def event(data: bytes, kind: str = "") -> bytes:
    """Write a server-sent event, with its kind if it has one."""
    head = f"event: {kind}\n".encode() if kind else b""
    return head + b"data: " + data + b"\n\n"


def failure(error: MeshError) -> bytes:
    """Write the event of an error, after which the stream ends."""
    return event(error_object(error))


def reason(answer: Answer) -> str:
    """Return OpenAI's finish reason of an answer."""
    if answer.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if answer.calls else "stop"
