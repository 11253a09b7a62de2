"""The load of a recorded trace: its requests as arrivals, and rate and lengths for each model."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from meshllm.errors import UserError
from meshllm.scheduler.architecture import Architecture
from meshllm.scheduler.load import MAX_TOKENS, Lengths, ModelLoad
from meshllm.scheduler.simulator import Arrival
from meshllm.traces.trace import TraceLine, read_trace

MAX_REQUESTS = 20_000  # simulated for each placement in a second
QUANTILES = 100  # of recorded lengths


def read_load(path: Path) -> list[TraceLine]:
    """Read the requests of a trace that a placement has to serve, at most `MAX_REQUESTS`.

    Those that failed, or ended before their prompt was read, are left out.

    Raises:
        UserError: the trace is invalid, or too short to have a rate.
    """
    found = read_trace(path)
    lines = [each for each in found if each.finish_reason != "error" and each.prompt_tokens]
    lines = lines[:MAX_REQUESTS]
    if len(lines) < 2 or lines[-1].at <= lines[0].at:
        raise UserError(f"The trace `{path}` has no two requests at different times")
    return lines


def numbers_of(models: Sequence[Architecture]) -> dict[str, int]:
    """Number models by the names that a trace may give them.

    Of the quantisations of a model, the first has its name, and each the one with its precision.
    """
    numbers: dict[str, int] = {}
    for number, each in enumerate(models):
        numbers.setdefault(each.name, number)
        numbers.setdefault(each.precise_name, number)
    return numbers


def load_of(lines: Sequence[TraceLine], names: Collection[str]) -> ModelLoad | None:
    """Return rate and lengths of the requests for a model of these names; None without any."""
    chosen = [line for line in lines if line.model in names]
    if not chosen:
        return None
    seconds = lines[-1].at - lines[0].at
    prompts = [_count(line.prompt_tokens) for line in chosen]
    return ModelLoad(
        len(chosen) / seconds,
        _lengths(prompts),
        _lengths([_count(line.new_tokens) for line in chosen]),
        cached=sum(_cached(line) for line in chosen) / sum(prompts),
    )


def arrivals(lines: Sequence[TraceLine], numbers: Mapping[str, int]) -> list[Arrival]:
    """Return the requests for models, in order of time; the others are left out."""
    return [
        Arrival(
            line.at - lines[0].at,
            numbers[line.model],
            _count(line.prompt_tokens),
            _count(line.new_tokens),
            _cached(line),
        )
        for line in lines
        if line.model in numbers
    ]


def _cached(line: TraceLine) -> int:
    """Return the prompt tokens that need no prefill; the last one always does."""
    return min(line.cached_tokens, _count(line.prompt_tokens) - 1)


def _count(tokens: int) -> int:
    return min(max(tokens, 1), MAX_TOKENS)


def _lengths(values: Sequence[int]) -> Lengths:
    ordered = sorted(values)
    if len(ordered) <= QUANTILES:
        return Lengths(tuple(ordered))
    last = len(ordered) - 1
    return Lengths(tuple(ordered[round(at * last / QUANTILES)] for at in range(QUANTILES + 1)))
