"""What a ring waits for, and why one was lost, with the names of nodes; decides nothing."""

from collections.abc import Collection

from meshllm.names import LossCause, NodeId
from meshllm.node.node_names import Profiles, name_of, names_of
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Lifecycle
from meshllm.protocol.ring.interruption import RingPlan, explain


def loading_model(here: Collection[NodeId], members: int | None, profiles: Profiles) -> str:
    """Say which nodes load the model, before any of them is ready."""
    if members is None:
        return f"the nodes are loading the model: {names_of(here, profiles)}"
    names = names_of(here, profiles)
    if len(here) > members:
        asked = "1 member is" if members == 1 else f"{members} members are"
        return f"{asked} requested, {len(here)} nodes are here, loading the model: {names}"
    return f"{len(here)} of {members} members are here, loading the model: {names}"


def gathering(
    agreement: Agreement, loading: Collection[NodeId], seconds: float, profiles: Profiles
) -> str:
    """Say which members are ready, which of those that are here load, and how long others have."""
    ready = agreement.ready
    ready_names = f": {names_of(ready, profiles)}" if ready else ""
    parts = [f"{len(ready)} of {len(ready) + agreement.lacking} members are ready{ready_names}"]
    if loading:
        parts.append(f"loading the model: {names_of(loading, profiles)}")
    parts.append(f"the others have up to {seconds:.0f} s")
    return "; ".join(parts)


def loading_layers(
    count: int, loading: Collection[NodeId], unlinked: NodeId | None, profiles: Profiles
) -> str:
    """Say which of the ``count`` nodes of a plan have not loaded their layers, or do not link."""
    loaded = f"{count - len(loading)} of {count} nodes have loaded their layers"
    if loading:
        return f"{loaded}; loading: {names_of(loading, profiles)}"
    missing = f"; no link to {names_of([unlinked], profiles)}" if unlinked else ""
    return f"{loaded} and connect{missing}"


def explain_loss(
    machine: Mesh, before: RingPlan | None, after: RingPlan | None
) -> tuple[LossCause, str]:
    """Return why a ring with its earlier plan was lost, and a phrase about it."""
    ends = Lifecycle.LEAVING, Lifecycle.LEFT
    here = {node: state for node, state in machine.states.items() if node in machine.alive}
    out = {
        LossCause.NODE_SILENT: machine.silent - machine.alive,
        LossCause.NODE_HUNG: {node for node, state in here.items() if state.obstacle},
        LossCause.NODE_REFUSED: {node for state in here.values() for node in state.faulty},
        LossCause.NODE_LEFT: {
            node for node, state in machine.states.items() if state.lifecycle in ends
        },
    }
    return explain(
        before,
        after,
        alive=machine.alive,
        out=out,
        name=lambda node: name_of(node, machine.profiles),
    )
