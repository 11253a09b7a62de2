"""Prints an answer as it is generated, and lays it out as JSON."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any, assert_never

from meshllm.cli.terminal import render
from meshllm.names import counted
from meshllm.request import (
    Answer,
    Backend,
    FinishReason,
    Interruption,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Resumable,
    Waiting,
)

_NOTE_CHARS = 200


async def stream(
    ring: Backend,
    request: Request,
    status: render.Status,
    write: Callable[[str], None],
    *,
    may_outline: bool = False,
) -> Answer:
    """Write the pieces of an answer as they arrive; cancelling ends it on every node.

    ``may_outline``: the ring may answer by outline, each point with a share of `max_tokens`.
    """
    answer: Answer | None = None
    async with aclosing(ring.generate(request)) as events:
        async for event in events:
            match event:
                case Waiting() | Prefilled():
                    status.show(_progress(event))
                case Piece():
                    _show(event, status, write)
                case PromptTokens() | Resumable():
                    pass
                case Interruption(_, text, pause_s):
                    status.notes.append(
                        f"{render.cut(render.safe(text), _NOTE_CHARS)}; {pause_s:.1f} s"
                    )
                case Answer():
                    answer = event
                    status.notes.extend(_cut(request, event, may_outline=may_outline))
                case _:
                    assert_never(event)
    if answer is None:
        raise RuntimeError("the ring ended without an answer")
    return answer


def _cut(request: Request, answer: Answer, *, may_outline: bool) -> list[str]:
    """Return a note on an answer that did not end by itself."""
    if answer.finish_reason is not FinishReason.LENGTH:
        return []
    count = answer.completion_tokens
    is_own = request.max_tokens is not None and count >= request.max_tokens
    if may_outline and not is_own:  # perhaps by the share of a point
        return ["the answer was cut"]
    limit = "`max_tokens`" if is_own else "the context, or what the mesh allows"
    broken = "; its JSON is incomplete" if request.schema else ""
    return [f"the answer was cut after {counted(count, 'token')} by {limit}{broken}"]


def _progress(event: Waiting | Prefilled) -> str:
    if isinstance(event, Waiting):
        return f"waiting: {render.one_line(event.reason)}" if event.reason else "prefill"
    return f"prefill, {event.done} of {event.total} tokens"


def _show(piece: Piece, status: render.Status, write: Callable[[str], None]) -> None:
    if piece.reasoning:
        status.reason(piece.reasoning)
    if piece.text:
        status.give_way(piece.text)
        write(piece.text)


def as_fields(answer: Answer) -> dict[str, Any]:
    """Lay an answer out for ``--json``."""
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tokens": list(answer.tokens),
        "completion_tokens": answer.completion_tokens,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "finish_reason": str(answer.finish_reason),
        "ttft_ms": round(answer.ttft_ms, 3),
        "ms_per_token": round(answer.ms_per_token, 3),
        "tokens_per_second": round(answer.tokens_per_second, 3),
        "tokens_per_step": round(answer.tokens_per_step, 3),
        "hops": [
            {
                "rank": hop.rank,
                "node": hop.node,
                "layers": str(hop.span),
                "compute_ms": round(hop.compute_ms, 3),
                "serialise_ms": round(hop.serialise_ms, 3),
                "queue_ms": round(hop.queue_ms, 3),
                "wire_ms": round(hop.wire_ms, 3),
                "bytes_per_token": round(hop.bytes_per_token, 1),
            }
            for hop in answer.hops
        ],
    }
