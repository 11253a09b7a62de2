"""An answer by outline on a real ring, by a directive that forces its points."""

import re
from dataclasses import replace

from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.outline.backend import OutlineBackend
from meshllm.outline.directive import Directive
from meshllm.outline.eligibility import OutlineMode
from meshllm.outline.points import Point
from meshllm.request import Answer, Event, Piece, Prefilled, Request, Sampling, Turn

POINTS = [Point(1, "Nodes"), Point(2, "Spans"), Point(3, "Links")]
FORCED = Directive("forced", re.compile(""), "its parts", read=lambda _, __: POINTS)
ASKED = Request(
    turns=(Turn(role="user", content="What is a ring?"),),
    sampling=Sampling(temperature=0.8, seed=7),
    max_tokens=160,
)


async def answered(request: Request, *, speculates: bool) -> tuple[list[Event], Answer]:
    """Answer on a new ring."""
    config = InferenceConfig(threads=1, speculation=speculates)
    options = RingOptions(nodes=2, inference=config)
    async with open_local_ring(resolve("builtin"), options) as ring:
        outline = OutlineBackend(ring, OutlineMode.ON, directives=[FORCED])
        events = [event async for event in outline.generate(request)]
        assert ring.entry.sessions == 0
    assert isinstance(events[-1], Answer)
    return events, events[-1]


async def test_the_points_continue_the_cache_of_the_outline() -> None:
    events, answer = await answered(ASKED, speculates=True)

    totals = [event.total for event in events if isinstance(event, Prefilled)]
    assert answer.text == "".join(event.text for event in events if isinstance(event, Piece))
    assert re.findall(r"^\d\. .*$", answer.text, re.MULTILINE)[:1] == ["1. Nodes"]
    assert totals[-1] == answer.prompt_tokens
    assert answer.cached_tokens > 3 * (totals[0] - 8)  # what a template may render differently


async def test_the_same_seed_gives_the_same_answer() -> None:
    _, one = await answered(ASKED, speculates=True)
    _, again = await answered(ASKED, speculates=False)
    _, other = await answered(
        replace(ASKED, sampling=replace(ASKED.sampling, seed=8)), speculates=True
    )

    assert (one.text, one.tokens) == (again.text, again.tokens)
    assert one.text != other.text
