"""Nodes that join and leave a mesh of several models, which are stopped, served and used, or not.

    python -m tests.bench.turnover --changes 10000
    python -m tests.bench.turnover --shares --changes 2000
    python -m tests.bench.turnover --spans --changes 300

After every change each node computes `assign`, and moves. Nothing else is simulated: how rings form
is the matter of `tests.simulation`. It prints how many nodes moved, and how often a model had no
ring although the memory for all models was there, or for all that are used.

With ``--shares`` up to 12 nodes follow plans, so that they take part in several rings with shares
of their memory. After every change they exchange records until nothing changes; the command fails
if that does not end, or a node plans more memory than it has. With ``--spans`` up to 6 of them, of
several speeds, take turns in random order, and serve replicas that may share nodes; the command
fails too if a replica has no node of its own.
"""

import argparse
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter

from meshllm.names import Digest, GroupId, NodeId
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.grouping import assign, shortage
from meshllm.protocol.agreement.groups import UNASSIGNED, groups_of
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from meshllm.protocol.planning.plan import ModelSizes
from meshllm.protocol.planning.problem import HEADROOM_PERCENT
from meshllm.protocol.session.messages import DType
from tests.builders.sharing import served_model, shared_mesh

NODES, MODELS = 50, 6
SHARED_NODES, SHARED_SIZES = 12, (300, 700, 1500, 6000)
SPAN_NODES, SPAN_SIZES, SPEEDS = 6, (350, 650, 950, 1400, 2600), (0.005, 0.01, 0.01, 0.02)
SHARED_LAYER = 100  # bytes with its part of what stays free
LAYER = 80  # bytes
SIZES = (200, 300, 500, 900, 1500)  # bytes of memory of a node
ROOM = 10  # layers of a node that may be left over in each group: a node is not divided
FIT_TWO = 4  # layers that any two nodes hold: a ring of two has no third


@dataclass
class Report:
    """What happened in a simulated mesh."""

    changes: int = 0
    moves: int = 0
    """Nodes that moved after a node joined or left, other than the one that joined."""
    most: int = 0
    """Of one such change."""
    unserved: int = 0
    """Changes after which a model had no ring although there was memory."""
    unstable: int = 0
    """Changes after which assigning again moved a node."""
    differing: int = 0
    """Changes after which two nodes would have assigned differently."""
    shares: int = 0
    """The most shares of all nodes at a time."""
    spans: int = 0
    """Changes after which a replica is served that shares nodes with an earlier one."""


class Turnover:
    """A mesh under change, determined by its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.models = [self._model(number) for number in range(MODELS)]
        self.served = set(range(1, MODELS))
        """The further ones that are served now."""
        self.used: set[int] = set()
        """Those that somebody asked for lately."""
        self.memory: dict[NodeId, int] = {}
        self.places: dict[NodeId, GroupId] = {}
        self.sizes = random.choice((SIZES, (500,)))
        self.report = Report()

    def run(self, changes: int) -> Report:
        """Make changes."""
        for _ in range(changes):
            self._change()
        return self.report

    def _model(self, number: int) -> Charter:
        random = self.random
        members = random.choice((None, None, 2))
        layers = random.randint(2, FIT_TWO if members else 12)
        sizes = ModelSizes(
            f"m{number}", (LAYER,) * layers, (0,) * layers, 0, 0,
            tied=False, hidden_size=1, itemsize=4, context=1,
        )  # fmt: skip
        digest, replicas = Digest(bytes([number]) * 32), random.choice((1, 1, 1, 2))
        charter = Charter(1, sizes, DType.FLOAT32, digest, members=members)
        return replace(charter, replicas=replicas)

    def _change(self) -> None:
        newcomer, is_of_nodes = None, self.random.random() < 0.8 or not self.memory
        if is_of_nodes:
            newcomer = self._come_or_go()
        elif self.random.random() < 0.5:
            self.used ^= {self.random.randrange(MODELS)}
        elif (number := self.random.randrange(1, MODELS)) in self.served:
            self.served.remove(number)
        else:
            self.served.add(number)
        view = self._view()
        found = assign(view)
        moved = [at for at, place in self.places.items() if found[at] != place and at != newcomer]
        self.places = dict(found)
        self._count(view, len(moved) if is_of_nodes else 0)

    def _come_or_go(self) -> NodeId | None:
        random, count = self.random, len(self.memory)
        if count > 1 and (count == NODES or random.random() < 0.45):
            gone = random.choice(sorted(self.memory))
            del self.memory[gone], self.places[gone]
            return None
        node = NodeId(random.randbytes(32))
        self.memory[node], self.places[node] = random.choice(self.sizes), UNASSIGNED
        return node

    def _view(self) -> MeshView:
        others = tuple(sorted((self.models[at] for at in self.served), key=lambda each: each.key))
        keys = tuple(model.key for model in self.models)
        links = tuple((node, 1000) for node in self.memory)
        used = tuple(sorted(self.models[at].key for at in self.used & {0, *self.served}))
        return MeshView(
            min(self.memory),
            replace(self.models[0], models=others),
            min(self.memory),
            {at: Profile("", "", (), size, models=keys) for at, size in self.memory.items()},
            {
                at: StateRecord(Lifecycle.SERVING, links, group=place, used=used)
                for at, place in self.places.items()
            },
        )

    def _count(self, before: MeshView, moves: int) -> None:
        report, view = self.report, self._view()
        report.changes += 1
        report.moves += moves
        report.most = max(report.most, moves)
        report.unstable += assign(view) != self.places
        report.differing += assign(replace(before, me=max(self.memory))) != self.places
        served = {0, *self.served}
        report.unserved += self._lacks(view, served) or self._lacks(view, self.used & served)

    def _lacks(self, view: MeshView, models: set[int]) -> bool:
        """Return whether a model has no ring although there is memory for all of these."""
        keys = {self.models[at].key for at in models}
        groups = groups_of(view.charter)
        first = {each.id for each in groups if not each.replica and each.charter.key in keys}
        return self._suffices(models) and bool(first & shortage(view).keys())

    def _suffices(self, models: set[int]) -> bool:
        """Return whether there is memory for these models, however the nodes are divided."""
        usable = (size * (100 - HEADROOM_PERCENT) // 100 for size in self.memory.values())
        needed = sum(self.models[at].shape.layers + ROOM for at in models)
        return sum(size // LAYER for size in usable) >= needed


class SharedTurnover:
    """A mesh under change whose nodes share their memory between rings, determined by its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.models = [
            served_model(number, random.randint(1, 6), random.choice((1, 1, 2)))
            for number in range(MODELS)
        ]
        self.sizes: tuple[int, ...] = SHARED_SIZES
        self.speeds: tuple[float, ...] = SPEEDS[1:2]
        self.nodes = SHARED_NODES
        self.mesh = shared_mesh({}, *self.models)
        self.report = Report()

    def run(self, changes: int) -> Report:
        """Make changes."""
        for _ in range(changes):
            self._change()
        return self.report

    def _change(self) -> None:
        random, mesh, report = self.random, self.mesh, self.report
        before = {node: part.first for node, part in mesh.parts.items()}
        newcomer = None
        if random.random() < 0.2 and mesh.memory:
            chosen = (each.key for each in self.models if random.random() < 0.5)
            mesh.used = tuple(sorted(chosen))
        elif len(mesh.memory) > 1 and (len(mesh.memory) == self.nodes or random.random() < 0.45):
            mesh.lose(random.choice(sorted(mesh.memory)))
        else:
            newcomer = NodeId(random.randbytes(32))
            mesh.join(newcomer, random.choice(self.sizes))
            mesh.layer_s[newcomer] = random.choice(self.speeds)
        mesh.settle()
        moved = [
            node
            for node, part in mesh.parts.items()
            if node != newcomer and before.get(node, part.first) != part.first
        ]
        report.changes += 1
        report.moves += len(moved)
        report.most = max(report.most, len(moved))
        report.unserved += self._suffices() and bool(self._unserved())
        report.spans += bool(mesh.sharing())
        shares = sum(len(part.further) for part in mesh.parts.values())
        report.shares = max(report.shares, shares)

    def _unserved(self) -> list[GroupId]:
        served = self.mesh.served()
        groups = groups_of(self.mesh.charter)
        return [each.id for each in groups if not each.replica and each.id not in served]

    def _suffices(self) -> bool:
        """Return whether one node has the memory for all models, with room to divide it."""
        needed = sum(len(each.shape.layer_bytes) * SHARED_LAYER for each in self.models)
        return max(self.mesh.memory.values()) >= 2 * needed


class SpanTurnover(SharedTurnover):
    """The same with replicas that share nodes of different speeds."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        random = self.random
        self.models = [
            served_model(number, random.randint(6, 12), random.choice((2, 3, 4)))
            for number in range(random.choice((1, 1, 2)))
        ]
        self.mesh = shared_mesh({}, *self.models)
        self.mesh.turns = random
        self.sizes, self.speeds, self.nodes = SPAN_SIZES, SPEEDS, SPAN_NODES


def main() -> None:
    """Run meshes of 500 changes each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first mesh")
    parser.add_argument("--shares", action="store_true", help="nodes take part in several rings")
    parser.add_argument("--spans", action="store_true", help="also in several of one model")
    arguments = parser.parse_args()
    start, reports, left, seed = perf_counter(), list[Report](), arguments.changes, arguments.seed
    kind, nodes = (SharedTurnover, SHARED_NODES) if arguments.shares else (Turnover, NODES)
    if arguments.spans:
        kind, nodes = SpanTurnover, SPAN_NODES
    while left > 0:
        reports.append(kind(seed).run(min(left, 500)))
        left, seed = left - 500, seed + 1
    changes = sum(each.changes for each in reports)
    print(f"{changes} changes of up to {nodes} nodes, {perf_counter() - start:.0f} s")
    print(f"moved besides the newcomer: {sum(each.moves for each in reports) / changes:.3f} nodes")
    print(f"  for a node that joins or leaves, at most {max(each.most for each in reports)}")
    for name in ("unserved", "unstable", "differing", "spans"):
        print(f"{name}: {sum(getattr(each, name) for each in reports)}")


if __name__ == "__main__":
    main()
