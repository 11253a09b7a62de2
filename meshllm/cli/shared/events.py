"""Differences between two status reports of a mesh, as text and as fields."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshllm.cli.terminal.render import bytes_of
from meshllm.log import Field
from meshllm.names import SHORT_LETTERS

if TYPE_CHECKING:
    from meshllm.status import MeshStatus, NodeStatus, RingStatus

_VERBS = {
    "leaving": "is leaving",
    "left": "left",
    "down": "is down",
    "refused": "is refused",
}

_PROGRESS = re.compile(
    r"\d+ of \d+ (members are here|nodes have loaded their layers)"
    r"|\d+ of \d+ members are ready|\d+ members? (?:is|are) requested"
    r"|the nodes are loading the model"
)
"""The starts of reasons that go on with names, of which a status line shows every change."""
_UNLINKED = re.compile("; no link to .*")


@dataclass(frozen=True, slots=True)
class Notice:
    """One event for the log."""

    event: str
    text: str
    fields: dict[str, Field] = field(default_factory=dict)


def notices(before: "MeshStatus | None", after: "MeshStatus") -> Iterator[Notice]:
    """Yield the changes in a cleaned ``/mesh/status``; without ``before``, everything is new."""
    known = {each.node: each for each in (_nodes(before) if before else ())}
    for each in _nodes(after):
        was = known.pop(each.node, None)
        if not each.is_self:
            yield from _of_node(was, each)
        elif each.state == "standby" and _is_new(was, each):
            yield _standby(each, "this node")
        elif each.state == "refused" and _is_new(was, each):
            fields: dict[str, Field] = {"node": each.node, "name": each.name, "reason": each.reason}
            yield Notice(each.state, f"this node is refused: {each.reason}", fields)
    for gone in known.values():
        fields = {"node": gone.node, "name": gone.name}
        yield Notice("removed", f"{gone.name or gone.short} was removed from the mesh", fields)
    yield from _of_providers(before, after)
    old, new = before.ring if before else None, after.ring
    is_other = old is None or _differs(old, new)
    if is_other and not (_is_going_on(old, new) and _lacks_one(after)):
        yield _of_ring(old, new, after.node)
    if _is_alone(after) and not (before and _is_alone(before)):
        from meshllm.status import UNANSWERED_HINT, unanswered

        text = f"{unanswered(after)}: {UNANSWERED_HINT}"
        yield Notice("alone", text, {"unanswered": after.unanswered})


def _nodes(status: "MeshStatus") -> "Iterator[NodeStatus]":
    """Yield the nodes; without a plan, those on standby merely wait for the others, as all do."""
    for each in status.nodes:
        is_idle = each.state == "standby" and not status.ring.digest
        yield replace(each, reason="") if is_idle else each


def _is_alone(status: "MeshStatus") -> bool:
    """Return whether a node serves on its own that should have met others, but has met none."""
    is_first = all(each.is_self for each in status.nodes)
    return status.ring.state == "serving" and is_first and status.unanswered > 0


def _of_node(before: "NodeStatus | None", after: "NodeStatus") -> Iterator[Notice]:
    state, reason = after.state, after.reason
    who = after.name or after.short
    fields: dict[str, Field] = {"node": after.node, "name": after.name, "reason": reason}
    if (before is None or _is_absent(before)) and not _is_absent(after):
        memory = f", {bytes_of(after.memory_bytes)}" if after.memory_bytes else ""
        yield Notice("joined", f"{who} joined ({after.short}{memory})", fields)
    elif before is None:
        return  # it left before the first report
    if state == "standby" and _is_new(before, after):
        yield _standby(after, who)
    elif state in _VERBS and _is_new(before, after):
        yield Notice(state, f"{who} {_VERBS[state]}{reason and f': {reason}'}", fields)


def _is_absent(node: "NodeStatus") -> bool:
    """Return whether a node has left or is lost; one whose engine is down is still here."""
    from meshllm.status import NO_LINK

    return node.state == "left" or (node.state == "down" and node.reason == NO_LINK)


def _standby(node: "NodeStatus", who: str) -> Notice:
    fields: dict[str, Field] = {"node": node.node, "name": node.name, "reason": node.reason}
    return Notice("standby", f"{who} is on standby: {node.reason}", fields)


def _of_providers(before: "MeshStatus | None", after: "MeshStatus") -> Iterator[Notice]:
    """Yield who provides which model from now on, and who does not any more."""
    old, new = (
        {(who, each.name) for each in (status.provided if status else ()) for who in each.providers}
        for status in (before, after)
    )
    for who, model in sorted(new - old):
        fields: dict[str, Field] = {"name": who, "model": model}
        yield Notice("provided", f"{who} provides {model}", fields)
    for who, model in sorted(old - new):
        fields = {"name": who, "model": model}
        yield Notice("not provided", f"{who} does not provide {model} any more", fields)


def _is_new(before: "NodeStatus | None", after: "NodeStatus") -> bool:
    """Return whether the state or reason is new; figures in a standby's reason always change."""
    old = (before.state, before.reason) if before else ("", "")
    if after.state == "standby":  # once, when a plan gives the reason
        return bool(after.reason) and not (old[0] == "standby" and old[1])
    return old != (after.state, after.reason)


def without_progress(reason: str) -> str:
    """Return what a ring waits for, without what only shows that the wait is going on.

    How many members are ready, and a node that cannot be reached, are news.
    """
    if not (found := _PROGRESS.match(reason)):
        return reason
    unlinked = _UNLINKED.search(reason)
    return (found[1] or found[0]) + (unlinked[0] if unlinked else "")


def _differs(before: "RingStatus", ring: "RingStatus") -> bool:
    old, new = (
        {**_facts(each), "reason": without_progress(each.reason)} for each in (before, ring)
    )
    return old != new


def _facts(ring: "RingStatus") -> dict[str, Field]:
    return {
        "state": ring.state, "reason": ring.reason, "digest": ring.digest, "epoch": ring.epoch
    }  # fmt: skip


def _is_going_on(before: "RingStatus | None", ring: "RingStatus") -> bool:
    """Return whether the same ring is still forming; a lost node is reported separately."""
    return before is not None and (before.state, before.digest) == (ring.state, ring.digest)


def _lacks_one(status: "MeshStatus") -> bool:
    away = {each.node for each in status.nodes if _is_absent(each)}
    return any(each.node in away for each in status.ring.stages)


def _of_ring(before: "RingStatus | None", ring: "RingStatus", me: str) -> Notice:
    names = _names(ring)
    stages = ", ".join(f"{names[each.node]} {each.layers}" for each in ring.stages)
    why = ring.reason and f": {ring.reason}"
    count = len(ring.stages)
    entries = (each for each in ring.stages[:1] if each.node != me)
    reads = "".join(f"; {names[each.node]} reads prompts" for each in entries)
    lacking = max((ring.members or 0) - count, 0)
    without = f" without {lacking} of the {ring.members} requested members" if lacking else ""
    what = f"epoch {ring.epoch}{without}: {stages}"
    text = {
        "serving": f"ring of {count} serving, {what}{reads}",
        "forming": f"ring of {count} forming, {what}{why}",
    }.get(ring.state, f"{ring.state}{why}")
    served = before and before.state == "serving" and before.digest == ring.digest
    if served and ring.state == "forming":
        text = f"ring of {count} lost, epoch {ring.epoch}"
    return Notice(ring.state, text, {**_facts(ring), "stages": stages})


def _names(ring: "RingStatus") -> dict[str, str]:
    """Return the name of each node of a ring, with its short id if another has the same name."""
    names = {each.node: each.name or each.node[:SHORT_LETTERS] for each in ring.stages}
    counts = Counter(names.values())
    return {
        node: name if counts[name] == 1 else f"{name} ({node[:SHORT_LETTERS]})"
        for node, name in names.items()
    }
