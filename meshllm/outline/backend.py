"""A backend that answers by outline, over any other backend.

Theory of operation
-------------------
The model is asked for a numbered outline first. Its points are then expanded at once, each in a
session of its own: these continue copies of its cache, travel round the ring together, and are
joined in order. Without an outline the request is answered as usual. A point that fails ends the
answer with its error, and closing the generator cancels all sessions.

The outline is asked for without reasoning. Whether a model can do that is known where it runs, and
engines cannot: it refuses, and the request is answered as usual unless it must be outlined. So it
is while no ring serves: a provider may answer at once what is not outlined.

The seed of a point follows from that of the request and the number of the point, its limits from
the outline: the same seed gives the same answer, whatever comes first.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from meshllm.merge import merge
from meshllm.outline.directive import DIRECTIVES, Directive, directive_for
from meshllm.outline.eligibility import OutlineMode, ends_of, may_be_long, objection
from meshllm.outline.join import Join
from meshllm.outline.outlining import Outlining
from meshllm.outline.points import Point
from meshllm.request import Answer, Backend, Event, Interruption, Piece, Prefilled, Request, Waiting
from meshllm.strict_json import WrongField

TOGETHER = 8  # sessions of one answer at a time


@dataclass(frozen=True, slots=True)
class OutlineBackend:
    """Answers by outline where the mode and the request allow it."""

    backend: Backend
    mode: OutlineMode
    together: int = TOGETHER
    """Sessions of one answer at a time."""
    directives: Sequence[Directive] = DIRECTIVES

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request, see `Backend`.

        The answer has the tokens of the outline, then those of each point, and the prompt tokens of
        all sessions.

        Raises:
            WrongField: the mode is `on`, and the request or the model cannot do that.
        """
        is_auto, error = self.mode is OutlineMode.AUTO, objection(request)
        if error and not is_auto:
            raise error
        if error or (is_auto and not may_be_long(request)):
            answer = self.backend.generate(request)
        else:
            question = ends_of(request.turns[-1]["content"])
            directive = directive_for(question, self.directives)
            answer = self._outlined(Outlining(request, directive, may_decline=is_auto))
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    async def _outlined(self, outlining: Outlining) -> AsyncGenerator[Event, None]:
        begin = _now()
        async with aclosing(self._outline(outlining)) as events:
            async for event in events:
                if isinstance(event, Waiting | Prefilled | Interruption):
                    yield event
                elif isinstance(event, Piece) and event.tokens:
                    yield Piece("", event.tokens)
                is_awaited = isinstance(event, Waiting) and event.reason != ""
                if (is_awaited and outlining.may_decline) or not outlining.take(event):
                    break
        points = outlining.points()
        answer = (
            self._expanded(outlining, points, begin) if points else self._usual(outlining, begin)
        )
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    async def _outline(self, outlining: Outlining) -> AsyncGenerator[Event, None]:
        """Yield the events of the outline; none if the model cannot write it and need not."""
        try:
            async with aclosing(self.backend.generate(outlining.asked)) as events:
                async for event in events:
                    yield event
        except WrongField as error:
            if error.name != "max_reasoning_tokens":
                raise
            if not outlining.may_decline:
                raise _unlimited() from None

    async def _expanded(
        self, outlining: Outlining, points: Sequence[Point], begin: float
    ) -> AsyncGenerator[Event, None]:
        join = Join(points, outlining.usage)
        first_s = _now() - begin
        for piece in join.begin():
            yield piece
        streams = [self.backend.generate(each) for each in outlining.expansions(points)]
        async with aclosing(merge(streams, self.together)) as events:
            async for place, event in events:
                for joined in join.take(place, event):
                    yield joined
        yield join.answer(first_s, _now() - begin)

    async def _usual(self, outlining: Outlining, begin: float) -> AsyncGenerator[Event, None]:
        """Answer as usual, and count the outline that was not used."""
        outline, before_s = outlining.usage, _now() - begin
        async with aclosing(self.backend.generate(outlining.request)) as events:
            async for event in events:
                match event:
                    case Prefilled(done, total):
                        yield Prefilled(outline.done + done, outline.read + total)
                    case Answer():
                        yield replace(
                            event,
                            tokens=(*outline.written, *event.tokens),
                            prompt_tokens=outline.read + event.prompt_tokens,
                            cached_tokens=outline.cached + event.cached_tokens,
                            ttft_ms=before_s * 1e3 + event.ttft_ms,
                        )
                    case _:
                        yield event


def _unlimited() -> WrongField:
    text = "`outline` cannot be used with a provider, or a model whose reasoning cannot be limited"
    return WrongField("meshllm.outline", text, hint="omit it, or ask another model")


def _now() -> float:
    return asyncio.get_running_loop().time()
