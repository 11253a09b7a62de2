"""A client that leaves in any phase of any request: all ranks of a ring free its caches.

The application is called without a server: it is told of the departure in the phase of the test.
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from starlette.types import ASGIApp

from meshllm.api.app import owner_application
from meshllm.model.files.source import resolve
from meshllm.model.text.grammar import Vocabulary
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.stage import StageNode
from meshllm.request import Event, Piece, Prefilled, Request, Sampling
from tests.builders.fake_node import FakeNode
from tests.builders.waiting import until

Fields = dict[str, Any]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = 900  # tokens: no answer ends before its client leaves
STORY = [{"role": "user", "content": "Tell me a story."}]
ASK: Fields = {"model": "builtin", "messages": STORY, "max_tokens": LONG, "seed": 1}
ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": LONG}
"""A schema that keeps answers from their end."""
SHAPED: Fields = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": ENDLESS}}
CALL = {
    "type": "function",
    "function": {
        "name": "sum",
        "parameters": {"type": "object", "properties": {"of": ENDLESS}, "required": ["of"]},
    },
}
PROMPT = "a fox saw the river and the mill, " * 60


@dataclass
class Watched:
    """A ring whose events are watched."""

    ring: LocalRing
    is_reached: Callable[[Event], bool]
    """Whether an event shows the phase of the test."""
    needed: int = 1
    """Answers that have to be in that phase."""
    seen: set[int] = field(default_factory=set)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    ended: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        async with aclosing(self.ring.generate(request)) as events:
            async for event in events:
                if self.is_reached(event):
                    self.seen.add(id(events))
                if len(self.seen) == self.needed:
                    self.reached.set()
                yield event
        self.ended += 1


@asynccontextmanager
async def ring_of(**more: Any) -> AsyncIterator[LocalRing]:
    inference = InferenceConfig(threads=1, **more)
    async with open_local_ring(resolve("builtin"), RingOptions(3, inference=inference)) as ring:
        yield ring


def begins(event: Event) -> bool:
    return isinstance(event, Piece)


def is_in_prompt(event: Event) -> bool:
    return isinstance(event, Prefilled) and 0 < event.done < event.total


async def leave(app: ASGIApp, path: str, fields: Fields, reached: asyncio.Event) -> list[Fields]:
    """Ask; leave once the phase is reached; return what was sent until the request has ended."""
    body, sent = json.dumps(fields).encode(), list[Fields]()
    news = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "root_path": "",
        "raw_path": path.encode(), "query_string": b"", "scheme": "http", "server": ("node", 80),
        "headers": [(b"host", b"node"), (b"content-type", b"application/json")],
    }  # fmt: skip

    async def receive() -> Fields:
        if news:
            return news.pop()
        await reached.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(120):
        await app(scope, receive, send)
    return sent


def is_free(stage: StageNode) -> bool:
    return not stage.sessions and not stage.budget.live_bytes


async def freed(ring: LocalRing) -> None:
    """Check that no rank holds a session; the stages hear of its end over their links."""
    assert ring.entry.sessions == 0
    assert ring.entry.budget.live_bytes == 0
    for stage in ring.stages:
        await until(partial(is_free, stage))
    assert len(ring.stages) == 2


async def check_departure(watched: Watched, path: str, fields: Fields) -> None:
    """Leave in a phase, streaming and not: no answer ends, and its caches are freed."""
    app = owner_application(FakeNode(backend=watched))
    for stream in (True, False):
        watched.seen.clear()
        watched.reached.clear()

        sent = await leave(app, path, fields | {"stream": stream}, watched.reached)

        assert len(watched.seen) == watched.needed
        assert stream or not sent
        await freed(watched.ring)
    assert watched.ended == 0


@pytest.mark.parametrize("choices", [1, 4])
async def test_while_answers_are_written(choices: int) -> None:
    async with ring_of() as ring:
        more = {"n": choices, "response_format": SHAPED}
        await check_departure(Watched(ring, begins, choices), CHAT, ASK | more)


async def test_while_a_call_is_written() -> None:
    async with ring_of() as ring:
        more = {"tools": [CALL], "tool_choice": "required"}

        def calls(event: Event) -> bool:
            return isinstance(event, Piece) and bool(event.calls)

        await check_departure(Watched(ring, calls), CHAT, ASK | more)


async def test_while_the_prompt_is_read() -> None:
    async with ring_of(chunk=8, prefix_bytes=0) as ring:
        fields = {"model": "builtin", "prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True}
        watched = Watched(ring, is_in_prompt)
        await check_departure(watched, TEXT, fields)


async def test_of_several_prompts_with_several_answers() -> None:
    async with ring_of() as ring:
        fields = {"model": "builtin", "prompt": ["One fox", "Two foxes"], "n": 2, "seed": 1}
        fields |= {"max_tokens": LONG, "ignore_eos": True}
        await check_departure(Watched(ring, begins, 4), TEXT, fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": LONG},
        ),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": LONG}),
    ],
    ids=["messages", "responses"],
)
async def test_in_other_dialects(path: str, fields: Fields) -> None:
    async with ring_of(chunk=8, prefix_bytes=0) as ring:
        await check_departure(Watched(ring, is_in_prompt), path, fields | {"model": "builtin"})


@pytest.mark.parametrize("stream", [True, False])
async def test_while_it_waits_for_a_place(monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    monkeypatch.setattr("meshllm.node.ring.runtime.MAX_SESSIONS", 1)
    reached = asyncio.Event()
    async with ring_of() as ring:
        app = owner_application(FakeNode(backend=ring))
        async with aclosing(ring.tokens((5, 6, 7), Sampling(), LONG)) as first:
            await anext(first)
            leaving = asyncio.ensure_future(leave(app, CHAT, ASK | {"stream": stream}, reached))
            await until(lambda: ring.entry._queue._waiting)
            reached.set()

            assert await leaving == []
            assert not ring.entry._queue._waiting
            assert ring.entry.sessions == 1
        await freed(ring)


@pytest.mark.parametrize("stream", [True, False])
async def test_while_its_schema_is_compiled(
    monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    loop, reached, end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def compile_slowly(*_: object, **__: object) -> None:
        loop.call_soon_threadsafe(reached.set)
        end.wait(120)

    monkeypatch.setattr(Vocabulary, "json_schema", compile_slowly)
    async with ring_of() as ring:
        app = owner_application(FakeNode(backend=ring))
        fields = ASK | {"response_format": SHAPED, "stream": stream}
        try:
            assert await leave(app, CHAT, fields, reached) == []
            await freed(ring)
        finally:
            end.set()
