"""Explanations for people: why a node stands by, and why a model does not fit."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from meshllm.errors import ModelError
from meshllm.names import Span, counted
from meshllm.protocol.planning.partition import GreedyFill
from meshllm.protocol.planning.plan import MAX_SECONDS, ModelSizes
from meshllm.protocol.planning.problem import MILLISECOND, Problem
from meshllm.protocol.planning.tours import length

_UNITS = "KiB", "MiB", "GiB"


def standby_reasons(problem: Problem, ring: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield each node outside a ring, and the reason."""
    if others := [node for node in range(len(problem.nodes)) if node not in ring]:
        fill = GreedyFill(problem)
        for node in others:
            yield node, _obstacle(problem, ring, node) or _predict(problem, fill, ring, node)


def refusal(problem: Problem, shape: ModelSizes) -> ModelError:
    """Return an error that says how much memory is missing for a model."""
    if uncovered := _uncovered(problem):
        return ModelError(
            f"No node may hold layers `{uncovered}` of `{shape.name}`: all have fixed layers",
            hint=f"start a node with `--layers {uncovered}`, or one without `--layers`",
        )
    usable = sum(max(0, memory) for memory in problem.memory)
    takes = (
        f"`{shape.name}` needs {format_bytes(problem.sizes[-1])} for {problem.layers} layers with"
        f" KV caches and {format_bytes(problem.ends_bytes)} for embedding and head, and the nodes"
        f" have {format_bytes(usable)} of usable memory"
    )
    lacking = _missing_bytes(problem)
    if lacking <= 0:
        return ModelError(
            f"No ring was found that holds `{shape.name}` in whole layers: {takes}",
            hint="add a node, fix fewer spans or members, or reduce the context",
        )
    return ModelError(
        f"The ring lacks {format_bytes(lacking)}: {takes}",
        hint="add a node or reduce the context",
    )


def format_bytes(size: int) -> str:
    """Format a number of bytes in the largest unit, up to GiB, that it reaches."""
    power = min((max(size, 1).bit_length() - 1) // 10, len(_UNITS))
    return f"{size / (1 << 10 * power):.1f} {_UNITS[power - 1]}" if power else f"{size} B"


def _obstacle(problem: Problem, ring: Sequence[int], node: int) -> str | None:
    if problem.memory[node] < 0:
        return "it is excluded"
    if not problem.room(node, entry=False):
        layer, usable = format_bytes(_smallest_layer(problem)), format_bytes(problem.memory[node])
        return f"a layer takes {layer} and it has {usable} of usable memory"
    if len(ring) - problem.client == problem.layers:
        return f"each of the {problem.layers} layers has its own node"
    if len(ring) == problem.members:
        return f"the ring is limited to {counted(problem.members, 'node')}"
    return None


def _predict(problem: Problem, fill: GreedyFill, ring: Sequence[int], node: int) -> str:
    """Compare the ring with the same ring plus a node at its best place."""
    places = range(1, len(ring) + 1)
    grown = min(length(problem.hops, (*ring[:at], node, *ring[at:])) for at in places)
    added = (grown - length(problem.hops, ring)) / MILLISECOND
    if added >= MAX_SECONDS * 1e3:  # an unmeasured link counts as the slowest possible
        return "no link from it to the ring is measured yet"
    before, after = fill.compute(ring), fill.compute((*ring, node))
    if before is None or after is None:
        return "the fixed spans leave it no layer"
    saved = (before - after) / MILLISECOND
    layers = f"save {saved:.1f} ms" if saved >= 0 else f"cost {-saved:.1f} ms"
    return f"its link adds {added:.1f} ms and its layers {layers}"


def _uncovered(problem: Problem) -> Span | None:
    """Return the first layers outside of all fixed spans; None if a node may hold any layers."""
    able = (node for node in range(len(problem.nodes)) if problem.memory[node] >= 0)
    if not all(node in problem.pins or problem.is_client(node) for node in able):
        return None
    stop = 0
    for span in sorted(problem.pins.values()):
        if span.start > stop:
            return Span(stop, span.start)
        stop = span.stop
    return Span(stop, problem.layers) if 0 < stop < problem.layers else None


def _missing_bytes(problem: Problem) -> int:
    """Return the bytes that do not fit, with the entry that lacks least."""
    layer = 0 if problem.client else _smallest_layer(problem)
    nodes = range(len(problem.nodes))
    held = [_span_bytes(problem, node, entry=False) for node in nodes]
    lacking = [problem.sizes[-1] + problem.ends_bytes] * (not problem.entries)
    for entry in problem.entries:
        others = sorted((held[node] for node in nodes if node != entry), reverse=True)
        if problem.members is not None:
            others = others[: problem.members - 1]
        short = max(0, layer - problem.usable(entry, entry=True))
        first = layer if short or problem.client else _span_bytes(problem, entry, entry=True)
        lacking.append(short + max(0, problem.sizes[-1] - first - sum(others)))
    return min(lacking)


def _span_bytes(problem: Problem, node: int, *, entry: bool) -> int:
    """Return the bytes of the largest span that a node can hold."""
    starts = range(problem.layers)
    spans = ((start, problem.stops(node, start, entry=entry)) for start in starts)
    return max(
        (problem.sizes[at[-1]] - problem.sizes[start] for start, at in spans if at), default=0
    )


def _smallest_layer(problem: Problem) -> int:
    return min(high - low for low, high in pairwise(problem.sizes))
