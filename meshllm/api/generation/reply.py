"""What the replies of chat and text completions share: choices, chunks and usage."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshllm.api.failure import compact, error_object
from meshllm.api.generation.headers import trace_of
from meshllm.errors import MeshError
from meshllm.request import Answer, FinishReason, TokenLogprobs
from meshllm.request import Request as Asked

PATIENCE = b": patience\n\n"  # a comment, which clients ignore
DONE = b"data: [DONE]\n\n"
STREAM = "text/event-stream"


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has come."""

    is_begun: bool = False
    """Its first chunk is written."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Collected for a reply that is not streamed."""
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
        fields = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint or None,
            "choices": choices,
            **more,
            "meshllm": {"seed": self.asked[0].sampling.seed, **self._trace()},
        }
        return compact(fields)

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
