"""Nodes that join and leave a mesh of several models, which are stopped, served and used, or not.

    python -m tests.bench.turnover --changes 10000
    python -m tests.bench.turnover --nodes 6 --changes 2000
    python -m tests.bench.turnover --shares --changes 2000
    python -m tests.bench.turnover --spans --changes 300

``--changes`` counts joins and leaves; models are served, stopped and used besides. A new mesh, with
other models and nodes, comes after 500 of them. It starts with 50 nodes, or ``--nodes``, and stays
near that number. After every change there are rounds, in each of which every node computes `assign`
and moves, until none does. Nothing else is simulated: how rings form is the matter of
`tests.simulation`.

The command fails if one of these bounds is broken:

- While there is memory for all models, or for all that are used, none of them lacks layers for more
  than the round in which nodes move.
- A node that joins or leaves moves at most `MAX_MOVES` others, and those that complete a further
  replica: where memory suffices for one more ring with it, spare nodes of other rings form it.
- No oscillation: nobody moves in a later round than the first after a change.
- All nodes compute the same.

It prints too how many moves took a node back to the group that it had left within `BACK` joins and
leaves.

With ``--shares`` up to 12 nodes follow plans, so that they take part in several rings with shares
of their memory; such a mesh starts empty. After every change they exchange records until nothing
changes; the command fails too if that does not end, or a node plans more memory than it has. With
``--spans`` up to 6 of them, of several speeds, take turns in random order, and serve replicas that
may share nodes; the command fails too if a replica has no node of its own.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import fmean
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
CHANGES = 500  # joins and leaves of one mesh
PULL = 20  # nodes: as many fewer than at first, and a join is certain next
MAX_MOVES = 4  # by a join or leave, beside those that complete a replica; seen in 10,000
MAX_ROUNDS = 1  # in which a model lacks layers
BACK = 10  # joins and leaves within which a node that returns to a group is counted
SHARED_NODES, SHARED_SIZES = 12, (300, 700, 1500, 6000)
SPAN_NODES, SPAN_SIZES, SPEEDS = 6, (350, 650, 950, 1400, 2600), (0.005, 0.01, 0.01, 0.02)
SHARED_LAYER = 100  # bytes with its part of what stays free
LAYER = 80  # bytes
SIZES = (200, 300, 500, 900, 1500)  # bytes of memory of a node
ROOM = 10  # layers of a node that may be left over in each group: a node is not divided
FIT_TWO = 4  # layers that any two nodes hold: a ring of two has no third


@dataclass
class Report:
    """What happened in simulated meshes."""

    joins: list[int] = field(default_factory=list)
    """Nodes that moved after each join, other than the one that joined."""
    leaves: list[int] = field(default_factory=list)
    """Nodes that moved after each leave."""
    nodes: list[int] = field(default_factory=list)
    """Of the mesh after each join or leave."""
    repairs: int = 0
    """The most moves by a join or leave, other than those to a replica that became complete."""
    others: int = 0
    """Changes of the models that are served or used."""
    ample: int = 0
    """Changes after which there was memory for all models."""
    layers: int = 0
    """Layers that changes left unserved until nodes moved, although there was memory."""
    rounds: int = 0
    """The most rounds in a row in which models lacked layers although there was memory."""
    unserved: int = 0
    """Changes after which a model had no ring although there was memory, when all had moved."""
    oscillations: int = 0
    """Rounds after the first one of a change in which a node moved."""
    back: int = 0
    """Moves to a group that the node left within `BACK` joins and leaves."""
    differing: int = 0
    """Changes after which two nodes would have assigned differently."""
    shares: int = 0
    """The most shares of all nodes at a time."""
    spans: int = 0
    """Changes after which a replica is served that shares nodes with an earlier one."""

    @property
    def changes(self) -> int:
        """Count the joins and leaves."""
        return len(self.nodes)

    def add(self, other: "Report") -> None:
        """Add what happened in another mesh."""
        self.joins += other.joins
        self.leaves += other.leaves
        self.nodes += other.nodes
        self.repairs = max(self.repairs, other.repairs)
        self.rounds = max(self.rounds, other.rounds)
        self.shares = max(self.shares, other.shares)
        for name in ("others", "ample", "layers", "unserved", "oscillations", "back", "differing",
                     "spans"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def broken(self) -> list[str]:
        """Name the bounds that are broken."""
        within = {
            f"moves by a join or leave: {self.repairs} of {MAX_MOVES}": self.repairs <= MAX_MOVES,
            f"rounds without layers: {self.rounds} of {MAX_ROUNDS}": self.rounds <= MAX_ROUNDS,
            f"models without a ring: after {self.unserved} changes": not self.unserved,
            f"oscillations: {self.oscillations}": not self.oscillations,
            f"nodes that compute differently: after {self.differing} changes": not self.differing,
        }
        return [text for text, holds in within.items() if not holds]

    def text(self, *, has_shares: bool) -> str:
        """Lay it out, with what is counted in meshes of this kind."""
        nodes, all_changes = self.nodes, self.changes + self.others
        lines = [
            f"{self.changes} joins and leaves ({len(self.joins)} and {len(self.leaves)}),"
            f" {self.others} other changes",
            f"nodes: {min(nodes)} at least, {fmean(nodes):.1f} mean, {max(nodes)} at most",
            f"moves of other nodes per join: {_spread(self.joins)}",
            f"moves of other nodes per leave: {_spread(self.leaves)}",
            f"  other than those that complete a replica: {self.repairs} at most",
            f"memory for all models: after {self.ample / all_changes:.0%} of all changes",
            f"changes after which a model had no ring although there was memory: {self.unserved}",
        ]
        if has_shares:
            return "\n".join(
                [
                    *lines,
                    f"most shares: {self.shares}",
                    f"changes with a replica that shares nodes: {self.spans}",
                ]
            )
        return "\n".join(
            [
                *lines,
                f"layers unserved until nodes moved: {self.layers},"
                f" for {self.rounds} rounds at most",
                f"oscillations: {self.oscillations}; back within {BACK} changes: {self.back}",
                f"changes after which nodes computed differently: {self.differing}",
            ]
        )


def _spread(moves: Sequence[int]) -> str:
    return f"{fmean(moves):.3f} mean, {max(moves)} at most" if moves else "none"


class Turnover:
    """A mesh under change, determined by its seed."""

    def __init__(self, seed: int, nodes: int = NODES) -> None:
        self.random = random = Random(seed)
        self.nodes = nodes
        self.most_layers = random.choice((12, nodes, 2 * nodes))
        """Of a model: with the most, memory is scarce."""
        self.models = [self._model(number) for number in range(MODELS)]
        self.served = set(range(1, MODELS))
        """The further ones that are served now."""
        self.used: set[int] = set()
        """Those that somebody asked for lately."""
        self.memory: dict[NodeId, int] = {}
        self.places: dict[NodeId, GroupId] = {}
        self.sizes = random.choice((SIZES, (500,)))
        self.report = Report()
        self.left: dict[NodeId, tuple[GroupId, int]] = {}
        """The group that each node left last, and the number of changes then."""
        self.waiting = 0
        """Rounds in a row in which models lacked layers although there was memory."""
        for _ in range(nodes):
            self._join()
        self.places = dict(assign(self._view()))
        self.incomplete = {*shortage(self._view())}
        """The groups that lack nodes."""

    def run(self, changes: int) -> Report:
        """Let so many nodes join or leave."""
        while self.report.changes < changes:
            self._change()
        return self.report

    def _model(self, number: int) -> Charter:
        random = self.random
        members = random.choice((None, None, 2))
        layers = random.randint(2, FIT_TWO if members else self.most_layers)
        sizes = ModelSizes(
            f"m{number}", (LAYER,) * layers, (0,) * layers, 0, 0,
            tied=False, hidden_size=1, itemsize=4, context=1,
        )  # fmt: skip
        digest, replicas = Digest(bytes([number]) * 32), random.choice((1, 1, 1, 2))
        charter = Charter(1, sizes, DType.FLOAT32, digest, members=members)
        return replace(charter, replicas=replicas)

    def _change(self) -> None:
        report, incomplete = self.report, self.incomplete
        if self.random.random() >= 0.8:
            report.others += 1
            self._change_models()
            for node in self._settle():
                self.left.pop(node, None)
            return
        newcomer = self._come_or_go()
        before = self._settle()
        others = before.keys() - {newcomer}
        (report.leaves if newcomer is None else report.joins).append(len(others))
        report.nodes.append(len(self.memory))
        completed = incomplete - self.incomplete
        repairs = sum(self.places[node] not in completed for node in others)
        report.repairs = max(report.repairs, repairs)
        for node in others:
            group, at = self.left.get(node, (UNASSIGNED, -BACK))
            report.back += self.places[node] == group and report.changes - at <= BACK
            self.left[node] = before[node], report.changes

    def _change_models(self) -> None:
        random = self.random
        if random.random() < 0.5:
            self.used ^= {random.randrange(MODELS)}
        elif (number := random.randrange(1, MODELS)) in self.served:
            self.served.remove(number)
        else:
            self.served.add(number)

    def _come_or_go(self) -> NodeId | None:
        random, count = self.random, len(self.memory)
        if count == 1 or random.random() < 0.5 + (self.nodes - count) / PULL:
            return self._join()
        gone = random.choice(sorted(self.memory))
        del self.memory[gone], self.places[gone]
        self.left.pop(gone, None)
        return None

    def _join(self) -> NodeId:
        node = NodeId(self.random.randbytes(32))
        self.memory[node], self.places[node] = self.random.choice(self.sizes), UNASSIGNED
        return node

    def _settle(self) -> dict[NodeId, GroupId]:
        """Let nodes move, round by round; return where those that did were before."""
        report, seen, before = self.report, [self.places], dict[NodeId, GroupId]()
        report.ample += self._suffices({0, *self.served})
        while True:
            view = self._view()
            lacks, found = shortage(view), dict(assign(view))
            self.incomplete, layers = {*lacks}, self._unserved(view, lacks)
            self.waiting = self.waiting + 1 if layers else 0
            report.rounds = max(report.rounds, self.waiting)
            if len(seen) == 1:
                report.layers += layers
                report.differing += assign(replace(view, me=max(self.memory))) != found
            if found == self.places:
                report.unserved += bool(layers)
                return before
            report.oscillations += len(seen) > 1
            if found in seen:  # it would go on without end
                return before
            moved = {at: place for at, place in self.places.items() if found[at] != place}
            before = moved | before
            self.places = found
            seen.append(found)

    def _view(self) -> MeshView:
        others = tuple(sorted((self.models[at] for at in self.served), key=lambda each: each.key))
        keys = tuple(model.key for model in self.models)
        hub = min(self.memory)  # that a path leads to each node is all that counts
        everybody = tuple((node, 1000) for node in self.memory)
        links = {node: everybody if node == hub else ((hub, 1000),) for node in self.memory}
        used = tuple(sorted(self.models[at].key for at in self.used & {0, *self.served}))
        return MeshView(
            hub,
            replace(self.models[0], models=others),
            hub,
            {at: Profile("", "", (), size, models=keys) for at, size in self.memory.items()},
            {
                at: StateRecord(Lifecycle.SERVING, links[at], group=place, used=used)
                for at, place in self.places.items()
            },
        )

    def _unserved(self, view: MeshView, lacks: Mapping[GroupId, int]) -> int:
        """Count the layers for which models lack nodes although there is memory for all of these.

        Of all served models; if there is no memory for all, of those that are used.
        """
        served = {0, *self.served}
        wanted = next((at for at in (served, self.used & served) if self._suffices(at)), set())
        keys = {self.models[at].key for at in wanted}
        groups = groups_of(view.charter)
        first = {each.id for each in groups if not each.replica and each.charter.key in keys}
        return sum(size // LAYER for group, size in lacks.items() if group in first)

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
        """Let so many nodes join or leave."""
        while self.report.changes < changes:
            self._change()
        return self.report

    def _change(self) -> None:
        random, mesh, report = self.random, self.mesh, self.report
        before, served = {node: part.first for node, part in mesh.parts.items()}, mesh.served()
        newcomer, moves = None, list[int]()  # of no join or leave
        if random.random() < 0.2 and mesh.memory:
            chosen = (each.key for each in self.models if random.random() < 0.5)
            mesh.used = tuple(sorted(chosen))
            report.others += 1
        elif len(mesh.memory) > 1 and (len(mesh.memory) == self.nodes or random.random() < 0.45):
            mesh.lose(random.choice(sorted(mesh.memory)))
            moves = report.leaves
        else:
            newcomer = NodeId(random.randbytes(32))
            mesh.join(newcomer, random.choice(self.sizes))
            mesh.layer_s[newcomer] = random.choice(self.speeds)
            moves = report.joins
        mesh.settle()
        moved = [
            node
            for node, part in mesh.parts.items()
            if node != newcomer and before.get(node, part.first) != part.first
        ]
        completed = mesh.served() - served
        moves.append(len(moved))
        if moves is report.joins or moves is report.leaves:
            report.nodes.append(len(mesh.memory))
            repairs = sum(mesh.parts[node].first not in completed for node in moved)
            report.repairs = max(report.repairs, repairs)
        report.ample += self._suffices()
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run meshes of some changes each; return 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--changes", type=int, default=10_000, help="joins and leaves")
    parser.add_argument("--nodes", type=int, default=NODES, help="of a mesh without shares")
    parser.add_argument("--seed", type=int, default=0, help="of the first mesh")
    parser.add_argument("--shares", action="store_true", help="nodes take part in several rings")
    parser.add_argument("--spans", action="store_true", help="also in several of one model")
    asked = parser.parse_args(arguments)
    if asked.changes < 1 or asked.nodes < 1:
        parser.error("there is at least one change, and one node")
    start, report, seed = perf_counter(), Report(), asked.seed
    while (left := asked.changes - report.changes) > 0:
        report.add(_mesh(asked, seed).run(min(left, CHANGES)))
        seed += 1
    print(f"{seed - asked.seed} meshes, {perf_counter() - start:.0f} s")
    print(report.text(has_shares=asked.shares or asked.spans))
    for each in (broken := report.broken()):
        print(f"broken: {each}", file=sys.stderr)
    return bool(broken)


def _mesh(asked: argparse.Namespace, seed: int) -> Turnover | SharedTurnover:
    if asked.spans:
        return SpanTurnover(seed)
    return SharedTurnover(seed) if asked.shares else Turnover(seed, asked.nodes)


if __name__ == "__main__":
    sys.exit(main())
