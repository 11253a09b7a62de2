"""What a node knows as Prometheus text; knows nothing about how it was measured.

https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

NODE_STATES = ("serving", "loading", "standby", "joining", "down", "left", "refused")
RING_STATES = ("serving", "forming", "waiting")
_PARTS = (
    ("compute", "Time in the model"),
    ("serialise", "Time between bytes and tensors"),
    ("queue", "Time in wait for the compute thread"),
    ("wire", "Time to the next rank"),
)


class _Sample(NamedTuple):
    labels: Mapping[str, object]
    value: float | None
    """None: not known, so not said."""


class _Family(NamedTuple):
    name: str
    kind: str
    help: str
    samples: list[_Sample]


def exposition(status: Mapping[str, Any]) -> str:
    """Write a status as Prometheus text: figures and names of nodes, never a word of a prompt."""
    lines = [line for family in _families(status) for line in _write(family)]
    return "\n".join(lines) + "\n"


def _families(status: Mapping[str, Any]) -> Iterator[_Family]:
    yield _gauge("info", "Version of this node.", _one(1, version=status["version"]))
    yield _gauge("up_seconds", "Time since this node started.", _one(status["since_s"]))
    states = Counter(node["state"] for node in status["nodes"])
    yield _gauge(
        "nodes",
        "Nodes of the mesh by state.",
        [_Sample({"state": s}, states[s]) for s in NODE_STATES],
    )
    yield from _ring(status["ring"])
    yield from _links(status["nodes"])
    sessions = status["sessions"]
    yield _gauge(
        "sessions",
        "Answers that are being made or wait for their turn.",
        [_Sample({"state": state}, sessions[state]) for state in ("active", "waiting")],
    )
    yield _counter(
        "sessions_total",
        "Answers that ended, by how.",
        [_Sample({"result": result}, sessions[result]) for result in ("served", "failed")],
    )
    yield _counter("tokens_total", "Tokens of the answers.", _one(sessions["tokens"]))


def _ring(ring: Mapping[str, Any]) -> Iterator[_Family]:
    yield _gauge(
        "ring_state",
        "1 for the state of the ring.",
        [_Sample({"state": state}, float(state == ring["state"])) for state in RING_STATES],
    )
    yield _gauge("ring_epoch", "Epoch of the plan.", _one(ring["epoch"]))
    measured, predicted = ring["measured"] or {}, ring["predicted"] or {}
    yield _gauge(
        "token_seconds",
        "Time of one token after the first.",
        [
            _Sample({"source": "measured"}, _seconds(measured.get("ms_per_token"))),
            _Sample({"source": "predicted"}, _seconds(predicted.get("ms_per_token"))),
        ],
    )
    yield _gauge(
        "first_token_seconds", "Time to the first token.", _one(_seconds(measured.get("ttft_ms")))
    )
    hops = measured.get("hops", [])
    for name, text in _PARTS:
        samples = [
            _Sample({"rank": hop["rank"], "node": hop["node"]}, _seconds(hop[f"{name}_ms"]))
            for hop in hops
        ]
        yield _gauge(f"hop_{name}_seconds", f"{text}, per token.", samples)


def _links(nodes: list[Mapping[str, Any]]) -> Iterator[_Family]:
    ends = [
        ({"node": node["short"], "name": node["name"]}, node["link"])
        for node in nodes
        if node["link"]
    ]

    def samples(field: str, scale: float = 1.0) -> list[_Sample]:
        return [
            _Sample(labels, None if link[field] is None else link[field] * scale)
            for labels, link in ends
        ]

    yield _gauge(
        "link_round_trip_seconds", "Round trip to a neighbour.", samples("round_trip_ms", 1e-3)
    )
    yield _gauge("link_heard_seconds", "Time since a neighbour was heard.", samples("heard_s"))
    for way in ("sent", "received"):
        yield _counter(f"link_{way}_bytes_total", f"Bytes {way}.", samples(f"bytes_{way}"))


def _gauge(name: str, text: str, samples: list[_Sample]) -> _Family:
    return _Family(f"meshllm_{name}", "gauge", text, samples)


def _counter(name: str, text: str, samples: list[_Sample]) -> _Family:
    return _Family(f"meshllm_{name}", "counter", text, samples)


def _one(value: float | None, **labels: object) -> list[_Sample]:
    return [_Sample(labels, value)]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _write(family: _Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.samples:
        if value is not None:
            inner = ",".join(f'{name}="{_escape(label)}"' for name, label in labels.items())
            yield f"{family.name}{{{inner}}} {value!r}" if inner else f"{family.name} {value!r}"


def _escape(label: object) -> str:
    """Write a name that a peer chose so that it stays one."""
    return str(label).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
