"""Headers of a response that say what answers, and the times of a traced request."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request

from meshllm.api.access.gate import EXPOSED
from meshllm.api.failure import INVALID, Failure, Refused
from meshllm.request import Answer
from meshllm.status import ModelStatus

TRACE = "x-meshllm-trace"
MAX_VALUE_CHARS = 128


def headers_of(model: ModelStatus) -> dict[str, str]:
    """Return the headers of a response: what is known of the model that answers.

    Other nodes say some of it; what does not fit into a header is left out.
    """
    values = (
        model.fingerprint.removeprefix("fp_"),
        model.weight_precision,
        str(model.epoch or ""),
    )
    return {name: value for name, value in zip(EXPOSED, values, strict=True) if _fits(value)}


def _fits(value: str) -> bool:
    return value.isascii() and value.isprintable() and 0 < len(value) <= MAX_VALUE_CHARS


def is_traced(request: Request) -> bool:
    """Return whether a request asks where its time went; raise `Refused` for other values."""
    asked = request.headers.get(TRACE, "0")
    if asked not in {"0", "1"}:
        text = f"Invalid value `{asked[:40]}` for the header `{TRACE}`"
        raise Refused(text, Failure(400, INVALID, "invalid_value"), hint="0 or 1")
    return asked == "1"


def trace_of(answers: Sequence[Answer | None]) -> list[dict[str, Any]]:
    """Return where the time of each answer went: as a whole, and means per token by rank.

    Nodes are not named: only the owner sees the names of machines.
    """
    return [_times(each) for each in answers if each]


def _times(answer: Answer) -> dict[str, Any]:
    hops = [{**asdict(each), "span": str(each.span)} for each in answer.hops]
    for each in hops:
        del each["node"]
    return {
        "ttft_ms": round(answer.ttft_ms, 3),
        "ms_per_token": round(answer.ms_per_token, 3),
        "tokens_per_step": round(answer.tokens_per_step, 3),
        "hops": [_rounded(each) for each in hops],
    }


def _rounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in fields.items()
    }
