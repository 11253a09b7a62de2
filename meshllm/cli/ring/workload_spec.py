"""Parses the file of ``--workload``: models with their load, kinds of machines, and links.

::

    [[model]]
    name = "builtin"           # or a folder, or org/name in the Hub's cache
    config = "big/config.json" # optional: dimensions of a model that is not on this machine
    quant = "int8"             # optional: none, int8 or int4
    rate = 2.0                 # requests per second
    prompt = 512               # tokens: one length, shortest and longest, or quantiles at equal
    answer = {median = 200, p90 = 500}  # distances; or a log-normal distribution
    cached = 0.5               # optional: fraction of prompt tokens that a prefix cache holds

    [[machine]]
    name = "a100"
    count = 8                  # optional
    memory = "80GB"            # of all its devices together
    tflops = 312               # peak in bfloat16, of one device
    gb_s = 2039                # peak memory bandwidth, of one device
    devices = 4                # optional: they share each layer
    device_gb_s = 300          # optional: link between them
    provider = true            # optional: an engine of its own, such as vLLM, for whole models

    [[machine]]
    name = "attic"
    models = ["builtin"]       # optional, for any machine: it may hold these only
    memory = "8GB"
    ms_per_layer = 2.5         # measured, for one row, instead of the peak speeds
    of = "builtin"             # a layer of this model; the first one if not given

    [[machine]]
    name = "desk"
    costs = "status.json"      # its cost table, as `ring status --json` of the mesh wrote it
    node = "desk"              # optional: its name there, or the beginning of its id
    of = "builtin"             # optional, as above; its own model if that is not given
    memory = "8GB"             # optional: what it offers there

    measured = true            # at the top: also the nodes of the running mesh

    [[link]]                   # optional
    a = "a100"
    b = "a100"                 # a kind of machine, or the same
    latency_ms = 0.1
    mbit_s = 100000            # optional
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from meshllm.cli.ring.recorded_load import arrivals, load_of, numbers_of, read_load
from meshllm.cli.ring.spec import LAN_S, read_link
from meshllm.cli.ring.toml_fields import (
    MAX_NAME,
    check_keys,
    needed,
    number,
    read_toml,
    tables,
    text,
)
from meshllm.errors import PeerFault, UserError
from meshllm.local_files import hint_of, read_regular
from meshllm.model.locate import CONFIG, MAX_CONFIG_BYTES, find_installed
from meshllm.names import Quant
from meshllm.protocol.planning.plan import LinkSpeed
from meshllm.scheduler.architecture import Architecture
from meshllm.scheduler.load import MAX_TOKENS, Lengths, ModelLoad
from meshllm.scheduler.machine import MEASURED_ROWS, MEASURED_TIMES, Costs, MachineKind
from meshllm.scheduler.placement import ServedModel, Workload
from meshllm.scheduler.simulator import Arrival
from meshllm.status import CostTable, MeshStatus, NodeStatus, from_json
from meshllm.traces.trace import TraceLine
from meshllm.units import MAX_MS, parse_memory

MAX_MODELS = 16
MAX_KINDS = 8
MAX_MACHINES = 64
MAX_RATE = 1e5  # requests per second
MAX_TFLOPS = 1e6
MAX_GB_S = 1e6
MAX_PATH = 1024  # characters
MAX_QUANTILES = 1024
MAX_STATUS_BYTES = 16 << 20
MAX_TABLE = 64  # entries of a cost table
MAX_CACHED = 0.99  # of a prompt

_LOAD = ("rate", "prompt", "answer", "cached")
_CONFIG_HINT = "give the `config.json` of a model, or its folder"
_HINT = "write tables `[[model]]` and `[[machine]]`; see `meshllm help scheduling`"


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload, and what was assumed for what its file omits."""

    workload: Workload
    assumed: tuple[str, ...]
    requests: tuple[Arrival, ...] | None = None
    """Those of a trace; None draws them from the loads of the models."""


def read_workload(
    path: Path, running: Callable[[], MeshStatus], trace: Path | None = None
) -> WorkloadSpec:
    """Read the file of ``--workload``; ``running`` asks the node of this machine for its mesh.

    Models without a load take that of the trace, whose requests are simulated.

    Raises:
        UserError: it is invalid.
        ModelError: a model is not on this machine.
        LinkLost: it asks for the running mesh, and no node runs here.
    """
    found = read_toml(path, _HINT)
    check_keys(found, "file", ("model", "machine", "link", "measured"))
    recorded = read_load(trace) if trace else ()
    models = _models(tables(found, "model"), path.parent, recorded)
    machines = tables(found, "machine")
    kinds = tuple(_machine(table, models, path.parent) for table in machines)
    wires = _wires(tables(found, "link"), [kind.name for kind in kinds])
    if _flag(found, "measured"):
        nodes, links = running_nodes(running())
        kinds, wires = (*kinds, *nodes), links | wires
    _check_counts(models, kinds)
    assumed = []
    if any("tflops" in table for table in machines):
        assumed.append("machines with peak speeds reach them")
    if any(kind.costs is None for kind in kinds[len(machines) :]) or any(
        "ms_per_layer" in table for table in machines
    ):
        assumed.append(f"{MEASURED_ROWS} rows take {MEASURED_TIMES:g} times as long as one row")
    if len(wires) < len(kinds) * (len(kinds) + 1) // 2:
        assumed.append(f"links without a latency have {LAN_S * 1e3:.1f} ms")
    workload = Workload(models, kinds, wires, LinkSpeed(LAN_S))
    if trace is None:
        return WorkloadSpec(workload, tuple(assumed))
    requests = arrivals(recorded, numbers_of([served.architecture for served in models]))
    if left := len(recorded) - len(requests):
        assumed.append(f"{left} requests of the trace for other models are left out")
    return WorkloadSpec(workload, tuple(assumed), tuple(requests))


def running_nodes(
    status: MeshStatus,
) -> tuple[tuple[MachineKind, ...], dict[tuple[str, str], LinkSpeed]]:
    """Describe the nodes of a ring, and the links between its neighbours, by their predicted times.

    Raises:
        UserError: there is no ring whose times are known.
    """
    ring, model = status.ring, status.model
    if model is None or ring.predicted is None or not ring.stages:
        raise UserError("The times of the running mesh are not known yet", hint="wait for its ring")
    config = _config(find_installed(model.shared_name) / CONFIG)
    architecture = Architecture.from_config(model.shared_name, config, Quant(model.quant))
    by_id = {node.node: node for node in status.nodes}
    names = [f"{stage.rank}-{stage.name}" for stage in ring.stages]
    kinds, wires = [], {}
    for at, (stage, hop) in enumerate(zip(ring.stages, ring.predicted.hops, strict=True)):
        if stage.layers and (node := by_id.get(stage.node)):
            measured = node.costs and (node.costs.model, node.costs.quant or model.quant)
            if node.costs and measured == (model.shared_name, model.quant):
                costs = costs_of(node.costs, architecture)
                kinds.append(MachineKind.with_costs(names[at], node.memory_bytes, costs))
            else:
                layer_s = hop.compute_ms / 1e3 / len(stage.layers)
                what = names[at], node.memory_bytes, layer_s, architecture
                kinds.append(MachineKind.measured(*what))
        wires[names[at], names[(at + 1) % len(names)]] = LinkSpeed(hop.wire_ms / 1e3)
    known = {kind.name for kind in kinds}
    return tuple(kinds), {pair: wire for pair, wire in wires.items() if known.issuperset(pair)}


def costs_of(table: CostTable, model: Architecture) -> Costs:
    """Read the cost table of a node for a model; raise `UserError` if it is invalid."""
    rows = [0, *(count for count, _ in table.layer_ms)]
    times = [*(ms for _, ms in table.layer_ms), table.head_ms]
    is_valid = 1 < len(rows) <= MAX_TABLE and all(low < high for low, high in pairwise(rows))
    if not is_valid or rows[-1] > MAX_TOKENS or not all(0 < each <= MAX_MS for each in times):
        raise UserError(
            f"Invalid cost table of `{table.model[:MAX_PATH]}`", hint="its rows and times rise"
        )
    layer_s = tuple((count, ms / 1e3) for count, ms in table.layer_ms)
    return Costs(model, layer_s, table.head_ms / 1e3)


def _check_counts(models: Sequence[ServedModel], kinds: Sequence[MachineKind]) -> None:
    machines = sum(kind.count for kind in kinds)
    for count, most, what in (
        (len(models), MAX_MODELS, "models"),
        (len(kinds), MAX_KINDS, "kinds of machines"),
        (machines, MAX_MACHINES, "machines"),
    ):
        if not 1 <= count <= most:
            raise UserError(f"{count} {what} described", hint=f"describe 1 to {most} {what}")


def _models(
    given: Sequence[Mapping[str, Any]], folder: Path, recorded: Sequence[TraceLine]
) -> tuple[ServedModel, ...]:
    made = [_architecture(table, folder) for table in given]
    numbers = numbers_of(made)
    return tuple(
        ServedModel(each, _load(table, [it for it in numbers if numbers[it] == at], recorded))
        for at, (each, table) in enumerate(zip(made, given, strict=True))
    )


def _architecture(table: Mapping[str, Any], folder: Path) -> Architecture:
    check_keys(table, "model", ("name", "config", "quant", *_LOAD))
    name = text(table, "name", MAX_PATH)
    config = (
        folder / text(table, "config", MAX_PATH)
        if "config" in table
        else find_installed(name) / CONFIG
    )
    return Architecture.from_config(name, _config(config), _quant(table))


def _load(
    table: Mapping[str, Any], names: Sequence[str], recorded: Sequence[TraceLine]
) -> ModelLoad:
    """Return the load of a model, by its table or as recorded for these names of it."""
    if not recorded:
        rate = needed(table, "rate", MAX_RATE, "model")
        cached = number(table, "cached", MAX_CACHED, zero=True) or 0.0
        return ModelLoad(rate, _lengths(table, "prompt"), _lengths(table, "answer"), cached)
    if given := [f"`{key}`" for key in _LOAD if key in table]:
        raise UserError(
            f"`{table['name']}` has {' and '.join(given)}, and a trace",
            hint="leave out either: the load of a trace is that of its requests",
        )
    if (load := load_of(recorded, names)) is None:
        named = " or ".join(f"`{each}`" for each in names)
        raise UserError(f"The trace has no request for {named}", hint="leave this model out")
    return load


def _config(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_regular(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}", hint=hint_of(error)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"Invalid JSON in `{path}`: {error}", hint=_CONFIG_HINT) from None
    if not isinstance(found, dict):
        raise UserError(f"`{path}` is not the config of a model", hint=_CONFIG_HINT)
    return found


def _quant(table: Mapping[str, Any]) -> Quant:
    name = table.get("quant", Quant.NONE)
    if name not in set(Quant):
        known = ", ".join(f"`{each}`" for each in Quant)
        raise UserError(f"Unknown quantisation `{str(name)[:64]}`", hint=f"one of {known}")
    return Quant(name)


def _lengths(table: Mapping[str, Any], key: str) -> Lengths:
    match table.get(key):
        case bool():
            pass
        case int(length):
            return Lengths((length,))
        case [*values] if values and len(values) <= MAX_QUANTILES and all(map(_is_count, values)):
            return Lengths(tuple(values))
        case {"median": _, "p90": _, **others} if not others:
            median, p90 = (
                needed(table[key], name, MAX_TOKENS, f"`{key}`") for name in ("median", "p90")
            )
            return Lengths.lognormal(median, p90)
    raise UserError(
        f"A model needs a valid `{key}`, in tokens",
        hint=f"write `{key} = 200`, `[20, 400]` or `{{median = 200, p90 = 500}}`",
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _machine(table: Mapping[str, Any], models: Sequence[ServedModel], folder: Path) -> MachineKind:
    kind = _timed_machine(
        {key: value for key, value in table.items() if key != "models"}, models, folder
    )
    return replace(kind, models=_allowed(table, models)) if "models" in table else kind


def _allowed(table: Mapping[str, Any], models: Sequence[ServedModel]) -> frozenset[str]:
    """Return the names of the models that a machine may hold."""
    known, given = numbers_of([served.architecture for served in models]), table["models"]
    is_listed = isinstance(given, list) and given and all(isinstance(it, str) for it in given)
    if not is_listed or not known.keys() >= set(given):
        named = ", ".join(f"`{each}`" for each in sorted(known))
        raise UserError("`models` of a machine must list models of the file", hint=f"of {named}")
    return frozenset(given)


def _timed_machine(
    table: Mapping[str, Any], models: Sequence[ServedModel], folder: Path
) -> MachineKind:
    common = ("name", "count", "memory")
    if "costs" in table:
        check_keys(table, "machine with a cost table", (*common, "costs", "node", "of"))
        return _with_costs(table, models, folder / text(table, "costs", MAX_PATH))
    if "ms_per_layer" in table:
        check_keys(table, "measured machine", (*common, "ms_per_layer", "of"))
        return MachineKind.measured(
            text(table, "name"),
            parse_memory(text(table, "memory")),
            needed(table, "ms_per_layer", MAX_MS, "machine") / 1e3,
            _timed(table, models),
            _count(table, "count"),
        )
    peaks = ("tflops", "gb_s", "devices", "device_gb_s", "provider")
    check_keys(table, "machine", (*common, *peaks, "ms_per_layer"))
    between = number(table, "device_gb_s", MAX_GB_S, zero=False)
    return MachineKind(
        name=text(table, "name"),
        memory_bytes=parse_memory(text(table, "memory")),
        flops=needed(table, "tflops", MAX_TFLOPS, "machine") * 1e12,
        bandwidth=needed(table, "gb_s", MAX_GB_S, "machine") * 1e9,
        count=_count(table, "count"),
        devices=_count(table, "devices"),
        device_link=inf if between is None else between * 1e9,
        is_provider=_flag(table, "provider"),
    )


def _with_costs(table: Mapping[str, Any], models: Sequence[ServedModel], path: Path) -> MachineKind:
    """Describe a machine by what it measured, as a status of its mesh in a file says."""
    try:
        status = from_json(MeshStatus, json.loads(read_regular(path, MAX_STATUS_BYTES)))
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}", hint=hint_of(error)) from None
    except (ValueError, RecursionError, PeerFault):
        hint = "write it with `meshllm ring status --json`"
        raise UserError(f"`{path}` is not the status of a mesh", hint=hint) from None
    name = text(table, "node") if "node" in table else ""
    timed = [each for each in status.nodes if each.costs and _is_named(each, name)]
    if len(timed) != 1:
        known = ", ".join(f"`{each.name[:MAX_NAME]}`" for each in status.nodes if each.costs)
        raise UserError(
            f"`{path}` has {len(timed)} cost tables of `{name or 'a node'}`, not 1",
            hint=f"name one with `node`: {known or 'none is measured yet'}",
        )
    (node,) = timed
    assert node.costs
    model = _timed(table if "of" in table else {"of": node.costs.model}, models)
    if node.costs.quant:
        model = replace(model, quant=_quant({"quant": node.costs.quant}))
    elif status.model and status.model.name == node.costs.model:  # an earlier version wrote it
        model = replace(model, quant=_quant({"quant": status.model.quant}))
    memory = parse_memory(text(table, "memory")) if "memory" in table else node.memory_bytes
    costs = costs_of(node.costs, model)
    return MachineKind.with_costs(text(table, "name"), memory, costs, _count(table, "count"))


def _is_named(node: NodeStatus, name: str) -> bool:
    return name in {"", node.name} or node.node.startswith(name)


def _timed(table: Mapping[str, Any], models: Sequence[ServedModel]) -> Architecture:
    """Return the model of whose layer the time was measured."""
    known = [served.architecture for served in models]
    name = text(table, "of", MAX_PATH) if "of" in table else None
    named = [each for each in known if name in {None, each.name, each.precise_name}]
    if not named:
        raise UserError(f"`of` names no model of the file: `{name}`")
    return named[0]


def _flag(table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"`{key}` must be `true` or `false`")
    return value


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, 1)
    if _is_count(value) and 1 <= value <= MAX_MACHINES:
        return int(value)
    raise UserError(f"`{key}` must be a whole number from 1 to {MAX_MACHINES}")


def _wires(
    given: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[tuple[str, str], LinkSpeed]:
    wires: dict[tuple[str, str], LinkSpeed] = {}
    for a, b, speed in map(read_link, given):
        if a not in names or b not in names or (a, b) in wires or (b, a) in wires:
            raise UserError(
                f"Invalid link `{a}` to `{b}`", hint="name two kinds of machines, each pair once"
            )
        wires[a, b] = speed
    return wires
