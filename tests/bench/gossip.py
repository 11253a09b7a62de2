"""Cost of gossip: `python -m tests.bench.gossip`.

Sans-IO machines of a fully connected mesh on a manual clock: messages and bytes that a node sends
per second in an idle, converged mesh, encrypted and framed as for the transport. With several
models, each node is in the ring of one, has all of them locally, and was asked for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshllm.names import Digest, Span
from meshllm.protocol.agreement.groups import groups_of
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Lifecycle
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.session.messages import DType
from tests.bench.report import Report, counts, parser_of
from tests.simulation.mesh_world import (
    CONFIG,
    SHAPE,
    Network,
    Node,
    Pipe,
    World,
    disagreement,
    remembered_signatures,
)

NODES = (3, 10, 50)
MODELS = (1, 6)
SETTLE_S = 20.0
IDLE_S = 20.0
SEAL_BYTES = 16  # tag of AES-256-GCM
FRAME_BYTES = 6  # WebSocket: two of header, four of mask


@dataclass(frozen=True, slots=True)
class Row:
    """A mesh size, and the traffic of each node."""

    nodes: int
    models: int
    settling_bytes: float
    idle_messages_per_s: float
    idle_bytes_per_s: float


class CountedWorld(World):
    """A world that counts what its nodes send."""

    messages = 0
    size = 0

    def send(self, node: Node, pipe: Pipe, data: bytes) -> None:
        self.messages += 1
        self.size += len(data) + SEAL_BYTES + FRAME_BYTES
        super().send(node, pipe, data)


def settle(nodes: int, models: int = 1) -> CountedWorld:
    """Start ``nodes`` nodes at once, and run until they have converged."""
    world = CountedWorld(nodes)
    world.network = Network(slowest_s=0.002)
    for number in range(nodes):
        world.start(number)
    serve(world, models)
    world.run(SETTLE_S)
    if wrong := disagreement(world):
        raise AssertionError(wrong)
    known = {node.mesh.charter and len(node.mesh.charter.served) for node in world.living}
    if known != {models}:
        raise AssertionError(f"nodes know {known} models")
    return world


def serve(world: CountedWorld, models: int) -> None:
    """Let the founder found a mesh of so many models, and every node serve one of them."""
    first, *others = (
        Charter(
            1,
            replace(SHAPE, name=f"org/model-{number}"),
            DType.FLOAT32,
            Digest(bytes([number]) * len(CONFIG)),
        )
        for number in range(models)
    )
    founder = world.nodes[0]
    world.act(founder, founder.mesh.publish(charter=first, now=world.now))
    whole = replace(first, models=tuple(sorted(others, key=lambda each: each.key)))
    world.act(founder, founder.mesh.publish(charter=whole, now=world.now))
    groups, keys = groups_of(whole), tuple(each.key for each in whole.served)
    for node in world.nodes.values():
        mesh, group = node.mesh, groups[node.number % len(groups)]
        alone = (PlanStage(node.id, Span(0, SHAPE.layers)),)
        plan = Plan(1, group.charter.shape.name, Ends.ENTRY, alone)
        state = replace(
            mesh.states[node.id],
            lifecycle=Lifecycle.SERVING,
            followed=plan.encode(),
            is_loaded=True,
            group=group.id,
            used=keys if others else (),
        )
        profile = replace(mesh.profiles[node.id], models=keys if others else ())
        world.act(node, mesh.publish(profile=profile, state=state, now=world.now))


def measure(nodes: int, models: int) -> Row:
    """Count what nodes send in a mesh that has converged."""
    world = settle(nodes, models)
    messages, size = world.messages, world.size
    world.run(IDLE_S)
    idle_messages = (world.messages - messages) / IDLE_S / nodes
    return Row(nodes, models, size / nodes, idle_messages, (world.size - size) / IDLE_S / nodes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of("gossip", __doc__)
    parser.add_argument("--nodes", type=counts, default=NODES)
    parser.add_argument("--models", type=counts, default=MODELS)
    options = parser.parse_args(arguments)
    report, rows = Report(options), list[Row]()
    report.say(
        "| nodes | models | to settle, kB per node | idle messages/s per node"
        " | idle B/s per node |",
        "|---|---|---|---|---|",
    )
    with remembered_signatures():
        for nodes in options.nodes:
            for models in options.models:
                row = measure(nodes, models)
                rows.append(row)
                report.say(
                    f"| {nodes} | {models} | {row.settling_bytes / 1e3:.0f}"
                    f" | {row.idle_messages_per_s:.1f} | {row.idle_bytes_per_s:.0f} |"
                )
    report.write(rows)


if __name__ == "__main__":
    main()
