"""Requests to the nodes of a simulated world, and their expected outcome; causes no faults."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from meshllm.errors import LinkLost, MeshError, ModelError, TimedOut
from meshllm.node.node import MeshNode
from meshllm.request import Answer, Piece, Request, Sampling
from tests.simulation.machines import Process
from tests.simulation.toy import reference

MAX_TOKENS = 10


@dataclass(eq=False)
class Asked:
    """A request and its outcome."""

    serial: int
    number: int
    process: Process
    request: Request
    cancel_at: int | None
    """Cancel after this number of pieces."""
    text: str = ""
    outcome: str = ""
    """Empty while it is running."""


def draw_request(random: Random, models: Sequence[str] = ("",)) -> Request:
    """Make up a request for one of the models."""
    sampling = Sampling(temperature=random.choice((0.0, 0.8)), seed=random.randrange(1000))
    raw = "".join(random.choice("abcdefgh") for _ in range(random.randint(1, 12)))
    tokens = random.randint(1, MAX_TOKENS)
    model = random.choice(models) if len(models) > 1 else models[0]
    return Request(raw=raw, sampling=sampling, max_tokens=tokens, model=model)


async def read(node: MeshNode, asked: Asked, fault: Callable[[str], None]) -> None:
    """Read the answer of a node until it ends or is cancelled."""
    try:
        asked.outcome = await _read(node, asked, fault)
    except MeshError as error:
        asked.outcome = repr(error)
        is_unknown = bool(asked.request.model) and isinstance(error, ModelError)
        if not isinstance(error, LinkLost | TimedOut) and not is_unknown:
            fault(f"request {asked.serial} ended with {error!r}")


async def _read(node: MeshNode, asked: Asked, fault: Callable[[str], None]) -> str:
    text, tokens = reference(asked.request)
    pieces = 0
    async with aclosing(node.router.generate(asked.request)) as events:
        async for event in events:
            if isinstance(event, Piece):
                asked.text += event.text
                pieces += 1
            if pieces == asked.cancel_at:
                return "cancelled"
            if not text.startswith(asked.text):
                fault(f"{asked.text!r} is not the beginning of {text!r}")
            if isinstance(event, Answer):
                if (event.text, event.tokens, asked.text) != (text, tokens, text):
                    fault(f"{asked.text!r}, {event} and not {text!r}")
                return "answered"
    return "ended without an answer"
