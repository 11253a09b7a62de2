import io
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import pytest

from meshllm.cli.shared.answer import stream
from meshllm.cli.terminal import render
from meshllm.names import LossCause
from meshllm.request import Event, FinishReason, Interruption, Piece, Request, Waiting
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


@pytest.mark.parametrize(
    ("request_", "note"),
    [
        (Request(raw="x", max_tokens=3), "the answer was cut after 3 tokens by `max_tokens`"),
        (
            Request(raw="x", max_tokens=3, schema="{}"),
            "the answer was cut after 3 tokens by `max_tokens`; its JSON is incomplete",
        ),
        (
            Request(raw="x", max_tokens=4),
            "the answer was cut after 3 tokens by the context, or what the mesh allows",
        ),
    ],
)
async def test_an_answer_that_was_cut_is_noted(request_: Request, note: str) -> None:
    cut = replace(answer_of("{ 1", 3), finish_reason=FinishReason.LENGTH)
    status = render.Status(io.StringIO())

    await stream(Canned([cut]), request_, status, print)

    assert status.notes == [note]


async def test_an_answer_of_one_token_is_cut_after_one_token() -> None:
    cut = replace(answer_of("{", 1), finish_reason=FinishReason.LENGTH)
    status = render.Status(io.StringIO())

    await stream(Canned([cut]), Request(raw="x", max_tokens=1), status, print)

    assert status.notes == ["the answer was cut after 1 token by `max_tokens`"]


@pytest.mark.parametrize(
    ("max_tokens", "note"),
    [(4, "the answer was cut"), (3, "the answer was cut after 3 tokens by `max_tokens`")],
)
async def test_a_cut_point_of_an_outline_blames_no_limit(max_tokens: int, note: str) -> None:
    """Each point has a share of `max_tokens`."""
    cut = replace(answer_of("1. Parks", 3), finish_reason=FinishReason.LENGTH)
    status = render.Status(io.StringIO())

    request = Request(raw="x", max_tokens=max_tokens)
    await stream(Canned([cut]), request, status, print, may_outline=True)

    assert status.notes == [note]


async def test_an_answer_that_ends_by_itself_has_no_note() -> None:
    status = render.Status(io.StringIO())

    await stream(Canned([answer_of("{ 1", 3)]), Request(raw="x", max_tokens=3), status, print)

    assert status.notes == []


async def test_a_terminal_shows_what_a_request_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stderr, written = io.StringIO(), list[str]()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    events: list[Event] = [
        Waiting("desk loads it\n\x1b[2J"), Waiting(""), Piece("a", (1,)), answer_of("a", 1),
    ]  # fmt: skip

    await stream(Canned(events), Request(raw="x"), render.Status(stderr), written.append)

    shown = stderr.getvalue()
    assert shown.index("waiting: desk loads it\\n\\x1b[2J") < shown.index("prefill")
    assert written == ["a"]
