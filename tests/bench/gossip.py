"""Cost of gossip: `python -m tests.bench.gossip`.

Sans-IO machines of a fully connected mesh on a manual clock: messages and bytes that a node sends
per second in an idle, converged mesh, encrypted and framed as for the transport.
"""

from dataclasses import dataclass

from tests.bench.report import Report, parser_of
from tests.simulation.mesh_world import (
    Network,
    Node,
    Pipe,
    World,
    disagreement,
    remembered_signatures,
)

NODES = (3, 10, 50)
SETTLE_S = 20.0
IDLE_S = 20.0
SEAL_BYTES = 16  # tag of AES-256-GCM
FRAME_BYTES = 6  # WebSocket: two of header, four of mask


@dataclass(frozen=True, slots=True)
class Row:
    """A mesh size, and the traffic of each node."""

    nodes: int
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


def settle(nodes: int) -> CountedWorld:
    """Start ``nodes`` nodes at once, and run until they have converged."""
    world = CountedWorld(nodes)
    world.network = Network(slowest_s=0.002)
    for number in range(nodes):
        world.start(number)
    world.run(SETTLE_S)
    if wrong := disagreement(world):
        raise AssertionError(wrong)
    return world


def main() -> None:
    """Print the table."""
    report = Report(parser_of("gossip", __doc__).parse_args())
    rows: list[Row] = []
    report.say(
        "| nodes | to settle, kB per node | idle messages/s per node | idle B/s per node |",
        "|---|---|---|---|",
    )
    with remembered_signatures():
        for nodes in NODES:
            world = settle(nodes)
            messages, size = world.messages, world.size
            world.run(IDLE_S)
            idle_messages = (world.messages - messages) / IDLE_S / nodes
            idle_size = (world.size - size) / IDLE_S / nodes
            rows.append(Row(nodes, size / nodes, idle_messages, idle_size))
            kilobytes = f"{size / nodes / 1e3:.0f}"
            report.say(f"| {nodes} | {kilobytes} | {idle_messages:.1f} | {idle_size:.0f} |")
    report.write(rows)


if __name__ == "__main__":
    main()
