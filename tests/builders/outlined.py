"""Answers by outline over a writer that notes its requests."""

from meshllm.outline.backend import OutlineBackend
from meshllm.outline.eligibility import OutlineMode
from meshllm.request import Event, Request
from tests.builders.writer import ASKED, Writer


async def events_of(
    writer: Writer, request: Request = ASKED, mode: OutlineMode = OutlineMode.ON, together: int = 8
) -> list[Event]:
    backend = OutlineBackend(writer, mode, together)
    return [event async for event in backend.generate(request)]
