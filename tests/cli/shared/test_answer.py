import io
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from meshllm.cli.shared.answer import stream
from meshllm.cli.terminal import render
from meshllm.names import LossCause
from meshllm.request import Event, Interruption, Piece, Request
from tests.builders.fake_ring import answer_of


@dataclass
class Canned:
    """Yields these events."""

    events: list[Event]

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        _ = request
        for event in self.events:
            yield event


async def test_a_loss_is_noted_in_one_line_and_interrupts_no_text() -> None:
    lost = Interruption(LossCause.NODE_LOST, "kitchen is gone; attic takes layers 4:8", 0.61)
    ring = Canned([Piece("a ", (1,)), lost, Piece("ring", (2,)), answer_of("a ring", 2)])
    written: list[str] = []

    status = render.Status(io.StringIO())
    await stream(ring, Request(raw="hello"), status, written.append)

    assert "".join(written) == "a ring"
    assert status.notes == ["kitchen is gone; attic takes layers 4:8; 0.6 s"]


async def test_the_text_of_a_peer_cannot_control_the_terminal() -> None:
    lost = Interruption(LossCause.NODE_LOST, "\x1b[2J" + "x" * 10_000, 0.6)

    status = render.Status(io.StringIO())
    await stream(Canned([lost, answer_of("", 0)]), Request(raw="hello"), status, print)

    [note] = status.notes
    assert "\x1b" not in note
    assert len(note) < 300
