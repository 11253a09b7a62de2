"""Why a ring was lost, as far as the records of the mesh tell."""

from meshllm.names import LossCause
from meshllm.node.founding import name_of
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Lifecycle
from meshllm.protocol.ring.interruption import RingPlan, explain


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
