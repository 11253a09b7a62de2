"""An engine with OpenAI's API: `python -m tests.builders.fake_engine PORT [MODEL]`.

It answers with the words of the last message. `die` ends it, `cut` closes the connection, `hold`
waits for a test.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.builders.waiting import until


@dataclass
class FakeEngine:
    """The state of an engine."""

    model: str = "fox"
    asked: list[tuple[dict[str, Any], str | None]] = field(default_factory=list)
    """Bodies, and their keys."""
    status: int = 200
    list_status: int = 200
    """Of the list of its models."""
    location: str = ""
    """Where the API has moved to."""
    closed: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends `hold`."""

    def application(self) -> Starlette:
        """Return the API."""
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, _: Request) -> Response:
        """List the models."""
        if self.location:
            return RedirectResponse(self.location)
        if self.list_status != 200:
            return JSONResponse({"error": {"message": "loading"}}, self.list_status)
        return JSONResponse({"data": [{"id": self.model, "max_model_len": 2048}]})

    async def chat(self, request: Request) -> Response:
        """Answer."""
        body = await request.json()
        self.asked.append((body, request.headers.get("authorization")))
        if self.status != 200:
            return JSONResponse({"error": {"message": "no\nway"}}, self.status)
        return StreamingResponse(self._words(body["messages"][-1]["content"]), 200)

    async def _words(self, text: str) -> AsyncGenerator[bytes, None]:
        try:
            for word in text.split():
                if word == "die":
                    os._exit(9)
                if word == "cut":
                    return
                if word == "fail":
                    yield b'data: {"error": {"message": "out of memory"}}\n\n'
                if word == "odd":
                    yield b"data: {odd\n\n"
                if word == "hold":
                    await self.go.wait()
                if word == "wait":
                    await asyncio.Event().wait()
                yield _event({"choices": [{"delta": {"content": f"{word} "}}]})
            yield _event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 3, "completion_tokens": len(text.split())}
            yield _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        finally:
            self.closed += 1


class EngineServer(uvicorn.Server):
    """Leaves the signal handlers of the tests as they are."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: uvicorn would restore those of an event loop that is closed by then."""
        yield


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[str]:
    """Serve an engine inside the context; yield the URL of its API."""
    config = uvicorn.Config(engine.application(), port=0, log_level="error", lifespan="off")
    server = EngineServer(config)
    config.load()
    running = asyncio.ensure_future(server.serve())
    await until(lambda: server.started)  # uvicorn has no event for it
    [port] = {each.getsockname()[1] for each in server.servers[0].sockets}
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = server.force_exit = True
        await running


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


if __name__ == "__main__":
    engine = FakeEngine(sys.argv[2] if sys.argv[2:] else "fox")
    uvicorn.run(engine.application(), port=int(sys.argv[1]), log_level="error")
