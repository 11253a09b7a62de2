"""The metrics of a node in the Prometheus text format.

https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from meshllm.status import LinkStatus, MeshStatus, NodeState, NodeStatus, RingState, RingStatus

METRICS = "text/plain; version=0.0.4"
"""The media type of the format."""

_PARTS = (
    ("compute", "Time of the forward pass"),
    ("serialise", "Time to convert between bytes and tensors"),
    ("queue", "Time waiting for the compute thread"),
    ("wire", "Time to the next rank"),
)


class _Sample(NamedTuple):
    labels: Mapping[str, object]
    value: float | None
    """None if unknown: the sample is left out."""


class _OwnRing(NamedTuple):
    labels: Mapping[str, object]
    status: RingStatus


class _Family(NamedTuple):
    name: str
    kind: str
    help: str
    samples: list[_Sample]


def exposition(status: MeshStatus) -> str:
    """Write a status as Prometheus text: numbers and node names, never prompt text."""
    lines = [line for family in _families(status) for line in _write(family)]
    return "\n".join(lines) + "\n"


def _families(status: MeshStatus) -> Iterator[_Family]:
    yield _gauge("info", "Version of this node.", _one(1, version=status.version))
    yield _gauge("up_seconds", "Time since this node started.", _one(status.since_s))
    states = Counter(node.state for node in status.nodes)
    yield _gauge(
        "nodes",
        "Nodes of the mesh by state.",
        [_Sample({"state": s}, states[s]) for s in NodeState],
    )
    yield from _rings(_own_rings(status))
    yield _gauge(
        "served_ring",
        "Whether a ring of the mesh serves.",
        [
            _Sample(
                {"model": each.model, "replica": each.replica},
                float(each.state is RingState.SERVING),
            )
            for each in status.rings
        ],
    )
    yield from _links(status.nodes)
    counts = status.sessions
    yield _gauge(
        "open_sessions",
        "Sessions that run, or wait for the first chunk of their prompt.",
        _one(counts.active - counts.waiting, state="active")
        + _one(counts.waiting, state="waiting"),
    )
    yield _counter(
        "sessions_total",
        "Sessions that ended, by result.",
        _one(counts.served, result="served") + _one(counts.failed, result="failed"),
    )
    yield _counter(
        "ring_losses_total",
        "Losses of a ring that an answer survived, by cause.",
        [_Sample({"cause": each.cause}, each.count) for each in counts.losses],
    )
    yield _counter(
        "paused_seconds_total",
        "Time that answers had no new text because of these losses.",
        [_Sample({"cause": each.cause}, each.paused_s) for each in counts.losses],
    )
    yield _counter(
        "replayed_tokens_total",
        "Tokens shown before these losses, which the next rings were given.",
        [_Sample({"cause": each.cause}, each.tokens) for each in counts.losses],
    )
    yield _counter(
        "recomputed_layer_rows_total",
        "Rows computed again after losses, times the layers that computed them, by cause.",
        [_Sample({"cause": each.cause}, each.rows) for each in counts.losses],
    )
    yield _gauge(
        "memory_bytes",
        "Memory of this process, in total and by use.",
        [_Sample({"part": part}, size) for part, size in asdict(status.memory).items()],
    )
    yield _counter("tokens_total", "Generated tokens.", _one(counts.tokens))


def _own_rings(status: MeshStatus) -> list[_OwnRing]:
    """Return the rings in which the node takes part; that it waits for without any."""
    found = [
        _OwnRing({"model": each.model, "replica": each.replica}, each.status)
        for each in status.rings
        if each.status
    ]
    model = status.model.name if status.model else ""
    return found or [_OwnRing({"model": model, "replica": 0}, status.ring)]


def _rings(rings: Sequence[_OwnRing]) -> Iterator[_Family]:
    yield _gauge(
        "ring_state",
        "1 for the state of a ring of this node.",
        [
            _Sample({**labels, "state": state}, float(state == ring.state))
            for labels, ring in rings
            for state in RingState
        ],
    )
    yield _gauge(
        "ring_info",
        "Policy, plan and execution of a ring of this node.",
        [
            _Sample(
                {
                    **labels,
                    "policy": ring.policy,
                    "plan": ring.digest,
                    "execution": ring.execution,
                },
                1,
            )
            for labels, ring in rings
        ],
    )
    yield _gauge(
        "ring_epoch",
        "Epoch of the plan.",
        [_Sample(labels, ring.epoch) for labels, ring in rings],
    )
    yield _gauge(
        "token_seconds",
        "Time per token after the first.",
        [
            _Sample({**labels, "source": source}, times.ms_per_token / 1e3 if times else None)
            for labels, ring in rings
            for source, times in (("measured", ring.measured), ("predicted", ring.predicted))
        ],
    )
    yield _gauge(
        "first_token_seconds",
        "Time to the first token.",
        [
            _Sample(labels, ring.measured.ttft_ms / 1e3 if ring.measured else None)
            for labels, ring in rings
        ],
    )
    for name, text in _PARTS:
        samples = [
            _Sample(
                {**labels, "rank": hop.rank, "node": hop.node}, getattr(hop, f"{name}_ms") / 1e3
            )
            for labels, ring in rings
            for hop in (ring.measured.hops if ring.measured else ())
        ]
        yield _gauge(f"hop_{name}_seconds", f"{text}, per token.", samples)


def _links(nodes: Iterable[NodeStatus]) -> Iterator[_Family]:
    ends = [({"node": each.short, "name": each.name}, each.link) for each in nodes if each.link]

    def samples(figure: Callable[[LinkStatus], float | None]) -> list[_Sample]:
        return [_Sample(labels, figure(link)) for labels, link in ends]

    yield _gauge(
        "link_round_trip_seconds",
        "Round-trip time to a peer.",
        samples(lambda link: link.round_trip_ms and link.round_trip_ms / 1e3),
    )
    heard = samples(lambda link: link.heard_s)
    yield _gauge("link_heard_seconds", "Time since the last message from a peer.", heard)
    sent, received = (samples(lambda it: it.bytes_sent), samples(lambda it: it.bytes_received))
    yield _counter("link_sent_bytes_total", "Bytes sent.", sent)
    yield _counter("link_received_bytes_total", "Bytes received.", received)


def _gauge(name: str, text: str, samples: list[_Sample]) -> _Family:
    return _Family(f"meshllm_{name}", "gauge", text, samples)


def _counter(name: str, text: str, samples: list[_Sample]) -> _Family:
    return _Family(f"meshllm_{name}", "counter", text, samples)


def _one(value: float | None, **labels: object) -> list[_Sample]:
    return [_Sample(labels, value)]


def _write(family: _Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.samples:
        if value is not None:
            inner = ",".join(f'{name}="{_escape(label)}"' for name, label in labels.items())
            yield f"{family.name}{{{inner}}} {value!r}" if inner else f"{family.name} {value!r}"


def _escape(label: object) -> str:
    """Escape a label value, which a peer may have chosen."""
    return str(label).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
