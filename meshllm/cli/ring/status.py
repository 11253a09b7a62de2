"""Lays out the status report of a node for a terminal."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from textwrap import wrap
from typing import Any, TypeVar, cast

from meshllm.cli.ring.picture import Box, picture
from meshllm.cli.terminal.render import PER_TOKEN, bytes_of, cut, cut_model, one_line, table
from meshllm.names import LossCause, Span, counted
from meshllm.status import (
    UNANSWERED_HINT,
    MeshStatus,
    ModelStatus,
    NodeStatus,
    RingStatus,
    ServedRing,
    of_providers,
    to_json,
    unanswered,
)

T = TypeVar("T")

MAX_SKEW_S = 5.0  # tolerated clock skew; beats, which carry the time, arrive up to 3 s late
_CAUSES = {
    LossCause.NODE_LOST: "of a node",
    LossCause.NODE_SILENT: "of a node that fell silent",
    LossCause.NODE_HUNG: "of a node that hung",
    LossCause.NODE_REFUSED: "of a node that others refuse",
    LossCause.NODE_LEFT: "of a node that left",
    LossCause.LINK_LOST: "of a link",
    LossCause.REPLANNED: "by another plan",
}
_ID = re.compile(r"`([a-z0-9]+)`")
_SHORT = 12  # characters of a name in the widest table
_NODES, _LINKS, _HOPS, _FURTHER = 2, 3, 4, 7  # positions in the layout


def clean(value: T) -> T:
    """Escape control characters in every text of a report: some texts come from other nodes."""
    return cast("T", _each_text(value, one_line))


def _with_names(status: MeshStatus) -> MeshStatus:
    """Put names before the ids of nodes in reasons and advice, where ids are in backticks."""
    names = {each.short: cut(each.name) for each in status.nodes if each.name}

    def name(found: re.Match[str]) -> str:
        known = names.get(found[1])
        return f"`{known}` ({found[1]})" if known else found[0]

    return cast("MeshStatus", _each_text(status, lambda text: _ID.sub(name, text)))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case StrEnum() | Span():
            return value
        case str():
            return change(value)
        case tuple():
            return tuple(_each_text(each, change) for each in value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            parts = {
                each.name: _each_text(getattr(value, each.name), change) for each in fields(value)
            }
            return replace(value, **parts)
        case _:
            return value


def lay_out(
    status: MeshStatus, columns: int, rows: int | None = None, *, is_whole: bool = False
) -> str:
    """Lay out a cleaned ``/mesh/status``, at most ``columns`` wide if names allow it.

    If it has more than ``rows`` lines, tables are dropped and the picture is kept. ``is_whole``
    truncates no table.
    """
    most, status = None if is_whole else columns, _with_names(status)
    further = _further(status, columns, most)
    totals, foot = "\n".join(_figures(_totals(status.ring), columns)), _foot(status, columns)
    parts = [
        _facts((*_about(status.ring, status.model), ("mesh", _mesh(status))), columns),
        _ring(status.ring, status, columns),
        _nodes(status, columns, most),
        _links(status, most),
        _hops(status.ring, most),
        totals if further else "",
        _rings(status, columns, most),
        further,
        _provided(status, most),
        foot if further else f"{totals}\n{foot}".lstrip("\n"),
    ]
    for part in (_FURTHER, _LINKS, _HOPS, _NODES):
        if rows is not None and _join(parts).count("\n") >= rows:
            parts[part] = ""
    return _join(parts)


def duration(seconds: float) -> str:
    """Format a duration in the largest fitting unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def ms(value: float, figures: int = 3) -> str:
    """Format milliseconds with ``figures`` digits; the integer part is never truncated."""
    return f"{value:.{max(figures - len(f'{value:.0f}'), 0)}f} ms"


def skewed_clocks(nodes: Iterable[NodeStatus]) -> list[str]:
    """Describe the clock skew of each linked node that exceeds the tolerance."""
    clocks = ((each, each.link.clock_s) for each in nodes if each.link)
    return [
        f"{cut(node.name or node.short)} is {duration(abs(ahead_s))}"
        f" {'ahead' if ahead_s > 0 else 'behind'}"
        for node, ahead_s in clocks
        if ahead_s is not None and abs(ahead_s) > MAX_SKEW_S
    ]


def _join(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _about(ring: RingStatus, model: ModelStatus | None) -> Iterator[tuple[str, str]]:
    """Yield the facts of a ring."""
    state = ring.state + (f": {ring.reason}" if ring.reason else "")
    what = f"{model.name}, {counted(model.layers, 'layer')}, {model.dtype}" if model else "no model"
    if model and model.quant != "none":
        what += f", {model.quant}"
    plan = f", epoch {ring.epoch}, plan {ring.digest}" if ring.digest else ""
    yield "ring", state
    yield "model", what
    if ring.execution:
        yield "engine", ring.execution
    yield "policy", f"{ring.policy}{plan}"
    if ring.members and 0 < len(ring.stages) < ring.members:
        yield "members", f"{len(ring.stages)} of the {ring.members} requested; others may join"


def _mesh(status: MeshStatus) -> str:
    return f"{status.mesh[:12]}, reported by {status.name}, up {duration(status.since_s)}"


def _facts(facts: Sequence[tuple[str, str]], columns: int) -> str:
    lines = (wrap(text, max(columns - 8, 20), subsequent_indent=" " * 8) for _, text in facts)
    return "\n".join(
        f"{name:<8}" + "\n".join(line) for (name, _), line in zip(facts, lines, strict=True)
    )


def _ring(ring: RingStatus, status: MeshStatus, columns: int) -> str:
    """Draw the nodes of a ring."""
    if not ring.stages:
        return ""
    measured = ring.measured
    planned = ring.predicted.hops_with_head if ring.predicted else ()
    times, about, digits = (measured.hops, "", 3) if measured else (planned, "~", 2)
    here = {each.node for each in status.nodes if each.is_self}
    hops = {hop.rank: hop for hop in times}
    boxes = [
        Box(
            name=("* " if stage.node in here else "") + stage.name,
            layers=str(stage.layers),
            compute=about + ms(hop.compute_ms, digits) if hop else "",
            wire=about + ms(hop.wire_ms, digits) if hop else "",
        )
        for stage in ring.stages
        for hop in [hops.get(stage.rank)]
    ]
    return picture(boxes, columns)


def _lines(text: str, most: int | None) -> list[str]:
    """Split a table, and truncate its lines visibly."""
    lines = text.split("\n")
    return lines if most is None else [cut(line, most) for line in lines]


def _nodes(status: MeshStatus, columns: int, most: int | None) -> str:
    rows = [
        (
            "*" if each.is_self else "",
            each.short,
            cut(each.name),
            "client" if each.role == "client" else each.state,
            each.layers,
            bytes_of(each.memory_bytes) if each.memory_bytes else None,
            _address(each),
        )
        for each in status.nodes
    ]
    header = ("", "node", "name", "state", "layers", "memory", "address")
    lines = _lines(table(header, rows), most)
    for each in status.nodes:
        if each.reason:
            why = f"{cut(each.name)} ({each.state}): {each.reason}"
            lines += wrap(why, columns, initial_indent="   ", subsequent_indent="     ")
    return "\n".join(lines)


def _address(node: NodeStatus) -> str | None:
    """Return the address at which a node was reached, or else its first advertised one."""
    at = node.link.address if node.link else ""
    return at or next(iter(node.addresses), None)


def _links(status: MeshStatus, most: int | None) -> str:
    rows = [
        (
            cut(each.name),
            link.path,
            None if link.round_trip_ms is None else ms(link.round_trip_ms),
            bytes_of(link.bytes_sent),
            bytes_of(link.bytes_received),
            f"{link.heard_s:.1f} s ago",
        )
        for each in status.nodes
        if (link := each.link)
    ]
    header = ("link to", "path", "round trip", "sent", "received", "last seen")
    return "\n".join(_lines(table(header, rows), most)) if rows else ""


def _hops(ring: RingStatus, most: int | None) -> str:
    measured, predicted = ring.measured, ring.predicted
    if not measured:  # the picture shows the planned times
        return ""
    planned = {hop.rank: hop for hop in predicted.hops_with_head} if predicted else {}
    rows = [
        (
            stage.rank,
            cut(stage.name, _SHORT),
            real.compute_ms,
            plan and plan.compute_ms,
            real.serialise_ms,
            real.queue_ms,
            real.wire_ms,
            plan and plan.wire_ms,
            round(real.bytes_per_token),
        )
        for stage, real in zip(ring.stages, measured.hops, strict=True)
        for plan in [planned.get(stage.rank)]
    ]
    parts = ("compute", "planned", "serialise", "queue", "wire", "planned")
    return "\n".join(
        [f"{PER_TOKEN}:", *_lines(table(("hop", "node", *parts, "bytes"), rows), most)]
    )


def _figures(lines: Iterable[str], columns: int) -> list[str]:
    """Wrap lines that begin with a word in a column of its own."""
    return [each for line in lines for each in wrap(line, columns, subsequent_indent=" " * 10)]


def _totals(ring: RingStatus) -> Iterator[str]:
    measured = ring.measured
    tokens = f", over {counted(measured.tokens, 'token')}" if measured else ""
    for word, figures, over in (("measured", measured, tokens), ("planned", ring.predicted, "")):
        if figures and figures.ms_per_token:
            rate = 1000 / figures.ms_per_token
            yield (
                f"{word:<10}{ms(figures.ms_per_token)} per token, {rate:.1f} tokens/s,"
                f" first token {ms(figures.ttft_ms)}{over}"
            )
    if ring.stages and not measured:
        yield f"{'measured':<10}nothing yet, ~ marks planned times: run `meshllm ring trace`"
    rooms = [stage.room_tokens for stage in ring.stages if stage.room_tokens is not None]
    if rooms:
        yield f"{'capacity':<10}{min(rooms)} tokens of KV cache for all sessions"


def _rings(status: MeshStatus, columns: int, most: int | None) -> str:
    """Lay out all rings of a mesh that has several, and what they wait for."""
    if len(status.rings) < 2:
        return ""
    rows = [
        (
            "*" if each.is_own else "",
            cut_model(each.model),
            each.replica + 1,
            each.state,
            ", ".join(f"{cut(stage.name)} {stage.layers}" for stage in each.stages) or None,
            len(each.standbys) or None,
        )
        for each in status.rings
    ]
    header = ("", "ring of", "replica", "state", "layers", "standby")
    lines = _lines(table(header, rows), most)
    for each in status.rings:
        if each.reason:
            why = f"{cut_model(each.model)} ({each.replica + 1}): {each.reason}"
            lines += wrap(why, columns, initial_indent="   ", subsequent_indent="     ")
    return "\n".join(lines)


def _further(status: MeshStatus, columns: int, most: int | None) -> str:
    """Lay out the further rings of this node as its first one."""
    parts = []
    for each in status.rings:
        if each.status is None or _is_first(each, status):
            continue
        model = next((it for it in status.models if it.name == each.model), None)
        parts += [
            _facts((*_about(each.status, model),), columns),
            _ring(each.status, status, columns),
            _hops(each.status, most),
            "\n".join(_figures(_totals(each.status), columns)),
        ]
    return _join(parts)


def _is_first(ring: ServedRing, status: MeshStatus) -> bool:
    first = status.model.name if status.model else ""
    is_same = ring.status is None or ring.status.digest == status.ring.digest
    return is_same and (ring.model, ring.epoch) == (first, status.ring.epoch)


def _provided(status: MeshStatus, most: int | None) -> str:
    beside = (of_providers(each.name, each.beside) for each in status.models if each.beside)
    rows = [
        (
            cut(each.name),
            ", ".join(map(cut, each.providers)),
            each.precision or "?",
            each.context or "?",
        )
        for each in (*status.provided, *beside)
    ]
    header = ("provided model", "by", "precision", "context")
    return "\n".join(_lines(table(header, rows), most)) if rows else ""


def _foot(status: MeshStatus, columns: int) -> str:
    counts = to_json(status.sessions)
    del counts["losses"], counts["recomputed"]
    states = ", ".join(f"{count} {word}" for word, count in counts.items())
    lines = _figures([f"sessions  {states}"], columns)
    losses, notes = status.sessions.losses, list[tuple[str, str]]()
    if survived := [
        f"{it.count} {_CAUSES[it.cause]}"
        f" ({it.paused_s:.1f} s, {counted(it.tokens, 'token')} replayed)"
        for it in losses
        if it.count
    ]:
        notes.append(("losses", f"survived, with the pauses of answers: {', '.join(survived)}"))
    if rows := [f"{it.rows} {_CAUSES[it.cause]}" for it in losses if it.rows]:
        notes.append(("recomputed", f" rows of single layers after losses: {', '.join(rows)}"))
    notes += [("advice", status.ring.advice), ("clock", _clock(status.nodes))]
    if found := unanswered(status):
        notes.append(("warning", f"{found}: {UNANSWERED_HINT}"))
    for word, text in (*notes, *(("warning", each) for each in status.warnings)):
        if text:
            lines += wrap(f"{word:<10}{text}", columns, subsequent_indent=" " * 10)
    return "\n".join(lines)


def _clock(nodes: Iterable[NodeStatus]) -> str:
    wrong = skewed_clocks(nodes)
    return f"{', '.join(wrong)}: see `meshllm doctor`" if wrong else ""
