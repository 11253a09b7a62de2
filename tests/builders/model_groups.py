"""Meshes of several models, and nodes that take part in their groups."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshllm.names import Digest, GroupId, ModelKey, NodeId, Span
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.groups import UNASSIGNED, groups_of
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from meshllm.protocol.planning.plan import Ends, ModelSizes, Plan, PlanStage
from meshllm.protocol.session.messages import DType
from tests.builders.sharing import NODES, SharedMesh, served_model, shared_mesh

LAYER = 80  # bytes; a node with 100 of memory holds one


def model(number: int, layers: int, *, ends: int = 0, **changes: Any) -> Charter:
    sizes = ModelSizes(
        f"m{number}", (LAYER,) * layers, (0,) * layers, ends, 0,
        tied=False, hidden_size=4, itemsize=2, context=10,
    )  # fmt: skip
    return replace(Charter(1, sizes, DType.BFLOAT16, Digest(bytes([number]) * 32)), **changes)


def mesh_of(*models: Charter, **terms: Any) -> Charter:
    first, *others = (replace(each, **terms) for each in models)
    return replace(first, models=tuple(sorted(others, key=lambda each: each.key)))


def group(charter: Charter, number: int, replica: int = 0) -> GroupId:
    """Return the group of the model of this number."""
    found = [
        each.id
        for each in groups_of(charter)
        if (each.charter.shape.name, each.replica) == (f"m{number}", replica)
    ]
    return found[0]


def view_of(
    charter: Charter,
    layers: Mapping[NodeId, float],
    places: Mapping[NodeId, GroupId] | None = None,
    followed: Mapping[NodeId, Plan] | None = None,
    **models: tuple[ModelKey, ...],
) -> MeshView:
    """View a fully linked mesh of nodes that hold some layers of any model."""
    keys = tuple(each.key for each in charter.served)
    profiles = {
        at: Profile("n", "1", (), round(count * 100), models=models.get(_name(at), keys))
        for at, count in layers.items()
    }
    states = {
        at: StateRecord(
            Lifecycle.SERVING,
            tuple((peer, 1000) for peer in layers if peer != at),
            group=(places or {}).get(at, UNASSIGNED),
            followed=(followed or {})[at].encode() if at in (followed or {}) else b"",
        )
        for at in layers
    }
    return MeshView(min(layers), charter, min(layers), profiles, states)


def _name(at: NodeId) -> str:
    return at[:1].decode(errors="replace")


def ring(model: str, *stages: tuple[NodeId, int, int], epoch: int = 1) -> Plan:
    spans = tuple(PlanStage(at, Span(start, stop)) for at, start, stop in stages)
    return Plan(epoch, model, Ends.ENTRY, spans)


def retracted(view: MeshView, at: NodeId) -> MeshView:
    """Let a node retract its offer, as its layers cannot be loaded."""
    failing = replace(view.profiles[at], weights=(b"w" * 16,) * 7)
    return replace(view, profiles={**view.profiles, at: failing})


def refusing(view: MeshView, one: NodeId, *others: NodeId) -> MeshView:
    """Let a node refuse others as neighbours."""
    return replace(view, states={**view.states, one: replace(view.states[one], faulty=others)})


def awaiting(view: MeshView, at: NodeId, obstacle: str) -> MeshView:
    return replace(view, states={**view.states, at: replace(view.states[at], obstacle=obstacle)})


def using(view: MeshView, *numbers: int) -> MeshView:
    """View a mesh in which these models were asked for lately, each at another node."""
    keys = {each.shape.name: each.key for each in view.charter.served}
    asked = dict(zip(view.states, (keys[f"m{number}"] for number in numbers), strict=False))
    states = {
        at: replace(state, used=(asked[at],) if at in asked else ())
        for at, state in view.states.items()
    }
    return replace(view, states=states)


def ids_of(mesh: SharedMesh) -> list[GroupId]:
    return [each.id for each in groups_of(mesh.charter)]


def settled(memory: Mapping[int, int], *models: Charter) -> SharedMesh:
    mesh = shared_mesh(memory, *models)
    mesh.settle()
    return mesh


def serve_also(mesh: SharedMesh, charter: Charter) -> GroupId:
    models = sorted((*mesh.charter.models, charter), key=lambda each: each.key)
    mesh.charter = replace(mesh.charter, models=tuple(models))
    return next(each.id for each in groups_of(mesh.charter) if each.charter.key == charter.key)


def stages(mesh: SharedMesh, number: int) -> int:
    """Return how many nodes the ring of a model has."""
    return len(mesh.plans[group(mesh.charter, number)].stages)


# Replicas that share nodes. A node with 2000 holds 16 layers, one with 650 holds 6.


def spans_of(mesh: SharedMesh) -> dict[int, list[tuple[int, str]]]:
    """Return the nodes of each replica of the first model that is served, and their layers."""
    numbers = {node: number for number, node in enumerate(NODES)}
    served = mesh.served()
    return {
        each.replica: [(numbers[at.node], str(at.span)) for at in mesh.plans[each.id].stages]
        for each in groups_of(mesh.charter)
        if each.id in served and each.charter.key == mesh.charter.key
    }


def speeds_of(mesh: SharedMesh, **layer_ms: float) -> SharedMesh:
    mesh.layer_s = {NODES["abcde".index(name)]: ms / 1e3 for name, ms in layer_ms.items()}
    return mesh


WHOLE = [(0, "0:12")]


def sharing() -> SharedMesh:
    """A mesh of a node that serves the model alone, and half of it in another ring."""
    mesh = settled({0: 2000, 1: 650}, served_model(0, 12, 2))
    assert spans_of(mesh) == {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}
    return mesh
