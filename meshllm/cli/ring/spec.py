"""Parses hypothetical nodes, as ``8GiB,4GiB@20ms`` or TOML, into offers and links.

A node of ``--spec`` has a memory, a time per layer and a one-way latency::

    [COUNTx]MEMORY[:TIME_PER_LAYER][@LATENCY]     3x8GiB:2.5ms@20ms

A file of ``--nodes`` has the same fields, and can describe single links::

    [[node]]
    name = "attic"
    memory = "8GiB"
    ms_per_layer = 2.5    # optional
    head_ms = 14.0        # optional
    [[link]]
    a = "attic"
    b = "cellar"
    latency_ms = 20.0
    mbit_s = 100.0        # optional
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

from meshllm.cli.ring.toml_fields import check_keys, number, read_toml, tables, text
from meshllm.errors import UserError
from meshllm.model.shape import free_memory
from meshllm.names import NODE_ID_BYTES, NodeId
from meshllm.protocol.planning.plan import Links, LinkSpeed, ModelSizes, Offer
from meshllm.status import MeshStatus, NodeState, NodeStatus
from meshllm.units import MAX_MS, parse_memory, parse_time

MAX_NODES = 64
MAX_MBIT_S = 1e6
MEMORY_BYTES_PER_S = 20e9  # two channels of DDR4; decode reads each weight once per token
LAN_S = 0.0005  # one way, wired, at home

ROWS = ((1, 1.0), (8, 1.17), (32, 1.35), (64, 1.93), (128, 2.74), (256, 4.24))
"""Relative time of a layer by number of rows: Qwen3-0.6B in bf16 on one CPU core."""

MEASURED = "the time per layer of each node of the ring, its head, and the links between them"
FREE = "no limits on the nodes, such as `--members` of the mesh"

_READY = {NodeState.SERVING, NodeState.STANDBY, NodeState.LOADING}

_FILE_HINT = "write a TOML file with a table `[[node]]` for each node; see `meshllm ring plan -h`"
_NODE = re.compile(r"(?:([1-9]\d{0,2})x)?([^:@]+)(?::([^:@]+))?(?:@([^:@]+))?")


@dataclass(frozen=True, slots=True)
class Spec:
    """Offers and links of hypothetical nodes."""

    offers: tuple[Offer, ...]
    links: Links
    names: Mapping[NodeId, str]
    assumed: tuple[str, ...]
    """Assumptions for what the spec omits."""
    measured: tuple[str, ...] = ()
    """What nodes of the running mesh have measured."""


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    memory: int
    layer_s: float | None
    head_s: float | None = None
    latency_s: float | None = None
    table: tuple[tuple[int, float], ...] = ()
    """Seconds of a layer by number of rows, if they were measured."""


def parse_spec(text: str, shape: ModelSizes) -> Spec:
    """Parse the value of ``--spec``; raise `UserError` if it is invalid."""
    nodes: list[_Node] = []
    for part in text.split(","):
        nodes += _expand(part.strip(), len(nodes) + 1)
        _check_count(len(nodes))
    pairs = ((a.name, b.name, _wire(a, b)) for a, b in combinations(nodes, 2))
    wires = {(a, b): wire for a, b, wire in pairs if wire is not None}
    return _spec(nodes, wires, shape)


def read_spec(path: Path, shape: ModelSizes) -> Spec:
    """Read the file of ``--nodes``; raise `UserError` if it is invalid."""
    found = read_toml(path, _FILE_HINT)
    check_keys(found, "file", ("node", "link"))
    nodes = [_node(table) for table in tables(found, "node")]
    _check_count(len(nodes))
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise UserError(f"Two nodes of `{path}` have the same name", hint="rename one of them")
    return _spec(nodes, _links(tables(found, "link"), names), shape)


def running_spec(status: MeshStatus, shape: ModelSizes) -> Spec:
    """Describe the nodes of a running mesh, by what their ring predicts from their measurements.

    Nodes on standby have no predicted times: they are assumed to be as fast as the others.
    """
    ring = status.ring
    assert ring.predicted is not None  # its caller has checked
    hops = list(zip(ring.stages, ring.predicted.hops, strict=True))
    layer_s = {
        stage.node: hop.compute_ms / 1e3 / len(stage.layers) for stage, hop in hops if stage.layers
    }
    mean_s = sum(layer_s.values()) / len(layer_s)
    known = [each for each in status.nodes if each.state in _READY and each.memory_bytes]
    names = _distinct({each.node: each.name or each.short for each in known})
    head_s = ring.predicted.head_ms / 1e3
    nodes = [
        _measured(status, each, names[each.node])
        or _Node(names[each.node], each.memory_bytes, layer_s.get(each.node, mean_s), head_s)
        for each in known
    ]
    after = [*ring.stages[1:], *ring.stages[:1]]
    wires = {
        (names[stage.node], names[other.node]): LinkSpeed(hop.wire_ms / 1e3)
        for (stage, hop), other in zip(hops, after, strict=True)
        if stage.node != other.node and {stage.node, other.node} <= names.keys()
    }
    found = _spec(nodes, wires, shape)
    assumed = [each for each in found.assumed if "without a time" not in each]
    timed = {each.name for each in nodes if each.table}
    others = [names[each.node] for each in known if each.node not in layer_s]
    if others := [name for name in others if name not in timed]:
        assumed.append(f"{', '.join(others)}: as fast as the nodes of the ring")
    return replace(found, assumed=(FREE, *assumed), measured=(MEASURED,))


def _measured(status: MeshStatus, node: NodeStatus, name: str) -> _Node | None:
    """Describe a node by the times that it measured for the model; None if it has none."""
    costs, model = node.costs, status.model
    if costs is None or model is None or not costs.layer_ms:
        return None
    if (costs.model, costs.quant) != (model.name, model.quant):
        return None
    table = tuple((rows, ms / 1e3) for rows, ms in costs.layer_ms)
    return _Node(name, node.memory_bytes, table[0][1], costs.head_ms / 1e3, table=table)


def own_spec(shape: ModelSizes) -> Spec:
    """Describe this machine, by its free memory."""
    return _spec([_Node("this machine", free_memory(), None)], {}, shape)


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return names that differ, by id."""
    count = Counter(names.values())
    return {node: f"{name} {node[:7]}" if count[name] > 1 else name for node, name in names.items()}


def _spec(
    nodes: Sequence[_Node], wires: Mapping[tuple[str, str], LinkSpeed], shape: ModelSizes
) -> Spec:
    ids = {node.name: NodeId(at.to_bytes(NODE_ID_BYTES)) for at, node in enumerate(nodes, start=1)}
    assumed = []
    if any(node.layer_s is None for node in nodes):
        speed = f"{MEMORY_BYTES_PER_S / 1e9:.0f} GB/s"
        assumed.append(f"nodes without a time per layer read memory at {speed}")
    if len({frozenset(pair) for pair in wires}) < len(nodes) * (len(nodes) - 1) // 2:
        assumed.append(f"links without a latency have {LAN_S * 1e3:.1f} ms")
    return Spec(
        offers=tuple(_offer(node, ids[node.name], shape) for node in nodes),
        links=Links({(ids[a], ids[b]): wire for (a, b), wire in wires.items()}, LinkSpeed(LAN_S)),
        names={node: name for name, node in ids.items()},
        assumed=tuple(assumed),
    )


def _offer(node: _Node, node_id: NodeId, shape: ModelSizes) -> Offer:
    mean = sum(shape.layer_bytes) / shape.layers
    layer_s = mean / MEMORY_BYTES_PER_S if node.layer_s is None else node.layer_s
    head_s = layer_s * shape.head_read_bytes / mean if node.head_s is None else node.head_s
    table = node.table or tuple((rows, layer_s * times) for rows, times in ROWS)
    return Offer(node_id, node.memory, table, head_s)


def _expand(part: str, number: int) -> list[_Node]:
    found = _NODE.fullmatch(part)
    if found is None:
        raise UserError(
            f"Invalid node `{part}`",
            hint="write `8GiB`, `3x8GiB` or `8GiB:2.5ms@20ms`: memory, time per layer, latency",
        )
    count, memory, layer, away = found.groups()
    size, layer_s, latency_s = parse_memory(memory), parse_time(layer), parse_time(away)
    if layer_s == 0:
        raise UserError(f"Time per layer of `{part}` is zero", hint="write it as `:2.5ms`")
    numbers = range(number, number + int(count or 1))
    return [_Node(f"n{at}", size, layer_s, latency_s=latency_s) for at in numbers]


def _wire(a: _Node, b: _Node) -> LinkSpeed | None:
    given = [node.latency_s for node in (a, b) if node.latency_s is not None]
    return LinkSpeed(max(given)) if given else None


def _check_count(nodes: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise UserError(f"{nodes} nodes described", hint=f"describe 1 to {MAX_NODES} nodes")


def _node(table: Mapping[str, Any]) -> _Node:
    check_keys(table, "node", ("name", "memory", "ms_per_layer", "head_ms"))
    return _Node(
        name=text(table, "name"),
        memory=parse_memory(text(table, "memory")),
        layer_s=_seconds(table, "ms_per_layer", zero=False),
        head_s=_seconds(table, "head_ms"),
    )


def read_link(table: Mapping[str, Any]) -> tuple[str, str, LinkSpeed]:
    """Read the two ends of a link, and its speed."""
    check_keys(table, "link", ("a", "b", "latency_ms", "mbit_s"))
    a, b = text(table, "a"), text(table, "b")
    latency_s = _seconds(table, "latency_ms")
    mbit_s = number(table, "mbit_s", MAX_MBIT_S, zero=False)
    if latency_s is None:
        raise UserError(f"The link of `{a}` and `{b}` has no `latency_ms`", hint="add it")
    return a, b, LinkSpeed(latency_s, inf if mbit_s is None else mbit_s * 1e6 / 8)


def _links(
    given: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[tuple[str, str], LinkSpeed]:
    wires: dict[tuple[str, str], LinkSpeed] = {}
    for a, b, speed in map(read_link, given):
        if a == b or a not in names or b not in names or (a, b) in wires:
            raise UserError(f"Invalid link `{a}` to `{b}`", hint="link two nodes, each pair once")
        wires[a, b] = speed
    return wires


def _seconds(table: Mapping[str, Any], key: str, *, zero: bool = True) -> float | None:
    milliseconds = number(table, key, MAX_MS, zero=zero)
    return None if milliseconds is None else milliseconds / 1e3
