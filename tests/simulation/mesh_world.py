"""Machines of a mesh, their drivers, and an unreliable network on a manual clock; causes no faults.

Every message goes through the codec.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, lru_cache, partial
from heapq import heappop, heappush
from itertools import combinations, count
from random import Random
from typing import Any
from unittest.mock import patch

from blake3 import blake3

from meshllm.names import Digest, NodeId
from meshllm.protocol.membership.actions import (
    Action,
    Changed,
    ClosedByPeer,
    Dial,
    Drop,
    SendToPeer,
)
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.codec import Bye, decode, encode
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    ENDS,
    Lifecycle,
    Profile,
    StateRecord,
)
from meshllm.protocol.planning.plan import Links, ModelSizes, Offer, Plan, PlanConstraints
from meshllm.protocol.planning.policies import make_plan
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.credential import Credential, Role, founder_credential, issue, remove
from meshllm.protocol.trust.identity import NodeKey, verify

MOST = 6  # nodes
TERMS: dict[str, tuple[Any, ...]] = {
    "replicas": (1, 2),
    "members": (None, 1, 2, 3),
    "policy": ("auto", "throughput"),
}
"""Terms of the charter that nodes change."""
START_S = 1_800_000_000.0  # time of day
DIAL_S = 10.0  # s until an unanswered dial times out
SHAPE = ModelSizes(
    "toy", (100,) * 4, (1,) * 4, 10, 10, tied=False, hidden_size=8, itemsize=4, context=8
)
CONFIG = Digest(blake3(b"toy").digest())
MANIFEST = (CONFIG[:DIGEST_PART_BYTES],) * (SHAPE.layers + ENDS)
MEMORY = 320  # bytes: two layers, their caches and the ends, with headroom


@cache
def member(number: int) -> tuple[NodeKey, Credential]:
    """Return a key and its credential; 0 is the founder, and each is invited by another."""
    key = NodeKey(blake3(b"member %d" % number).digest())
    if number == 0:
        return key, founder_credential(key, bytes(16))
    inviter, credential = member((number - 1) // 2)
    return key, issue(inviter, credential, key.node, Role.NODE)


@contextmanager
def remembered_signatures() -> Iterator[None]:
    """Verify each signature once, not once on each node: the time goes into schedules."""
    with (
        patch("meshllm.protocol.membership.gossip.verify", lru_cache(8192)(verify)),
        patch("meshllm.protocol.trust.credential.verify", lru_cache(8192)(verify)),
    ):
        yield


@contextmanager
def remembered_plans() -> Iterator[None]:
    """Plan once from each input, not once on each node."""
    planned = _remembering(make_plan)
    with (
        patch("meshllm.protocol.agreement.best_plan.make_plan", planned),
        patch("meshllm.protocol.agreement.advice.make_plan", planned),
    ):
        yield


def _remembering(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """Let nodes that plan from equal input share the result: planning is pure."""
    plans: dict[Hashable, Plan] = {}

    def planned(
        offers: Sequence[Offer], links: Links, shape: ModelSizes, **given: str | PlanConstraints
    ) -> Plan:
        key = (
            tuple(offers),
            _frozen(links),
            shape,
            *((name, _frozen(given[name])) for name in given),
        )
        if key not in plans:
            plans[key] = plan(offers, links, shape, **given)
        return plans[key]

    return planned


def _frozen(value: object) -> Hashable:
    """Return what is equal for equal values, of a dataclass with mappings too."""
    if not is_dataclass(value):
        return value
    parts = (getattr(value, field.name) for field in fields(value))
    return tuple(frozenset(part.items()) if isinstance(part, dict) else part for part in parts)


@dataclass(eq=False)
class Pipe:
    """One connection; messages arrive in order, unless the network duplicates them."""

    ends: tuple["Node", "Node"]
    arrived: dict[NodeId, float] = field(default_factory=dict)
    """When the last message to each end arrives."""

    def other(self, node: "Node") -> "Node":
        return self.ends[self.ends[0] is node]


@dataclass(eq=False)
class Node:
    """One process: a machine and its driver."""

    number: int
    incarnation: int
    mesh: Mesh
    is_up: bool = True
    is_paused: bool = False
    jump_s: float = 0.0
    pipes: dict[NodeId, Pipe] = field(default_factory=dict)
    backlog: list[Callable[[], None]] = field(default_factory=list)
    due: float = 0.0
    """When its machine is next woken."""

    @property
    def id(self) -> NodeId:
        return self.mesh.me


@dataclass
class Network:
    """Faults of the network."""

    loss: dict[tuple[int, int], float] = field(default_factory=dict)
    """Loss rate from one node to another; 1 is a cut."""
    duplicates: float = 0.0
    slowest_s: float = 0.05

    def carries(self, *way: int) -> bool:
        return self.loss.get((way[0], way[1]), 0.0) < 1


class World:
    """Some nodes, a network and a clock."""

    def __init__(
        self, seed: int, on_changed: Callable[["World", Node], None] | None = None
    ) -> None:
        self.random = Random(seed)
        self.now = self.random.uniform(0, 1000)
        self.network = Network()
        self.nodes: dict[int, Node] = {}
        self.counts: dict[int, int] = {}
        """The incarnation that each state folder remembers."""
        self.wishes: dict[str, list[tuple[Node, object]]] = {}
        """Changes of charter terms: the node and the value."""
        self._on_changed = on_changed or (lambda *_: None)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_up]

    @property
    def members(self) -> list[Node]:
        """The living nodes, which must find each other."""
        removed = {node for at in self.living for node in at.mesh.removals}
        return [node for node in self.living if node.id not in removed]

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heappush(self._events, (self.now + delay, next(self._order), event))

    def run(self, seconds: float) -> None:
        """Advance the clock."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heappop(self._events)
            event()
        self.now = end

    # What happens to nodes

    def start(self, number: int, *, forgets: bool = False) -> None:
        """Start or restart a node; a lost state folder restarts the incarnation."""
        if number in self.nodes and self.nodes[number].is_up:
            return
        self.counts[number] = 1 if forgets else self.counts.get(number, 0) + 1
        key, credential = member(number)
        incarnation = self.counts[number]
        mesh = Mesh(key, credential, incarnation, now=self.now, wall_s=START_S)
        node = self.nodes[number] = Node(number, incarnation, mesh)
        profile = Profile(
            f"n{number}",
            "1",
            (f"sim:{number}",),
            MEMORY,
            ((1, 50.0 * (1 + number)),),  # s; round trips are small in comparison
            model=SHAPE.name,
            weights=MANIFEST,
        )
        self.act(
            node, mesh.publish(profile=profile, state=StateRecord(Lifecycle.SERVING), now=self.now)
        )
        self.at(0, partial(self._remember, node))

    def crash(self, node: Node, *, silently: bool) -> None:
        node.is_up = False
        for pipe in list(node.pipes.values()):
            if not silently:
                self._close(node, pipe)

    def leave(self, node: Node) -> None:
        self.act(node, node.mesh.leave(self.now))
        node.is_up = False

    def pause(self, node: Node, seconds: float) -> None:
        node.is_paused = True
        self.at(seconds, partial(self.resume, node))

    def resume(self, node: Node) -> None:
        if not node.is_paused:
            return
        node.is_paused, backlog, node.backlog = False, node.backlog, []
        if self.random.random() < 0.5:
            self._wake(node)
        for event in backlog:
            self._to(node, event)
        self._wake(node)

    def remove(self, node: Node, victim: int) -> None:
        key, credential = member(node.number)
        spared = tuple(member(number)[0].node for number in range(MOST))
        removal = remove(key, credential.mesh, member(victim)[0].node, int(START_S), spared)
        self.act(node, node.mesh.remove(removal, self.now))

    def charter(self, *nodes: Node) -> None:
        """Let nodes change a term each, at the same time; the founder writes the first charter."""
        terms = self.random.sample(sorted(TERMS), len(nodes))
        for node, name in zip(nodes, terms, strict=True):
            charter = node.mesh.charter
            if charter is None and node.number == 0:
                charter = Charter(1, SHAPE, DType.FLOAT32, CONFIG)
            if charter is not None:
                value = self.random.choice(
                    [at for at in TERMS[name] if at != getattr(charter, name)]
                )
                self.wishes.setdefault(name, []).append((node, value))
                wanted = replace(charter, **{name: value})
                self.act(node, node.mesh.publish(charter=wanted, now=self.now))

    # The driver of every node

    def act(self, node: Node, actions: list[Action]) -> None:
        """Execute the actions of a machine."""
        for action in actions:
            match action:
                case SendToPeer(peer, message):
                    self.send(node, node.pipes[peer], encode(message))
                case Drop(peer, why) if not action.is_newcomer:
                    self.send(node, node.pipes[peer], encode(Bye(why)))
                    self._close(node, node.pipes[peer])
                case ClosedByPeer(peer):
                    self._close(node, node.pipes[peer])
                case Dial(peer):
                    self._dial(node, peer)
                case Changed():
                    self._on_changed(self, node)
                case _:
                    raise AssertionError(action)
        self._schedule(node)

    def _schedule(self, node: Node) -> None:
        if (due := node.mesh.deadline) != node.due:
            node.due = due
            self.at(max(0.0, due - self.now), partial(self._ring, node, due))

    def _ring(self, node: Node, due: float) -> None:
        if node.due == due and not node.is_paused:
            self._wake(node)

    def _wake(self, node: Node) -> None:
        if node.is_up:
            node.due = -1.0
            self.act(node, node.mesh.expire(self.now, START_S + self.now + node.jump_s))

    def _delay(self) -> float:
        return self.random.uniform(0.001, self.network.slowest_s)

    def send(self, node: Node, pipe: Pipe, data: bytes) -> None:
        other = pipe.other(node)
        if self.random.random() < self.network.loss.get((node.number, other.number), 0.0):
            return
        at = max(pipe.arrived.get(other.id, 0.0), self.now + self._delay())
        pipe.arrived[other.id] = at
        hear = partial(self._to, other, partial(self._hear, other, pipe, node.id, data))
        self.at(at - self.now, hear)
        if self.random.random() < self.network.duplicates:
            self.at(at - self.now + self.random.uniform(0, 2), hear)

    def _to(self, node: Node, event: Callable[[], None]) -> None:
        if node.is_paused:
            node.backlog.append(event)
        elif node.is_up:
            event()

    def _hear(self, node: Node, pipe: Pipe, peer: NodeId, data: bytes) -> None:
        if node.pipes.get(peer) is pipe:
            self.act(node, node.mesh.receive(peer, decode(data), self.now))

    def _close(self, node: Node, pipe: Pipe) -> None:
        """Close one end; the other notices after all sent messages, if anything reaches it."""
        other = pipe.other(node)
        del node.pipes[other.id]
        if self.network.carries(node.number, other.number):
            at = max(pipe.arrived.get(other.id, 0.0) - self.now, self._delay())
            self.at(at, partial(self._to, other, partial(self._closed, other, pipe, node.id)))

    def _closed(self, node: Node, pipe: Pipe, peer: NodeId) -> None:
        if node.pipes.get(peer) is pipe:
            del node.pipes[peer]
            self.act(node, node.mesh.unlinked(peer, self.now))

    def _remember(self, node: Node) -> None:
        """Dial a node that the state folder or the ticket knows: often while alone, else rarely.

        Two halves of a mesh that never met can find each other only in this way.
        """
        if not node.is_up or self.nodes[node.number] is not node:
            return
        others = [
            other.id for other in self.nodes.values() if other.id not in {node.id, *node.pipes}
        ]
        if others and not node.is_paused:
            self._dial(node, self.random.choice(others))
        self.at(10.0 if node.pipes else 2.0, partial(self._remember, node))

    def _dial(self, node: Node, peer: NodeId) -> None:
        self.at(2 * self._delay(), partial(self._answer, node, peer))

    def _answer(self, node: Node, peer: NodeId) -> None:
        """Let the listening side accept the link, if it can."""
        other = next((node for node in self.living if node.id == peer), None)
        is_there = other is not None and not other.is_paused and node.is_up
        if other is None or not is_there or not self._is_open(node, other):
            wait = self._delay() if other is None else DIAL_S
            self.at(wait, partial(self._to, node, partial(self._refused, node, peer)))
            return
        pipe, delay = Pipe((node, other)), self._delay()
        pipe.arrived[node.id] = self.now + delay  # no message on the new link overtakes its opening
        self.at(delay, partial(self._to, node, partial(self._link, node, pipe, True)))
        self._link(other, pipe, False)

    def _is_open(self, node: Node, other: Node) -> bool:
        there, back = (node.number, other.number), (other.number, node.number)
        return self.network.carries(*there) and self.network.carries(*back)

    def _refused(self, node: Node, peer: NodeId) -> None:
        node.mesh.refused(peer, self.now)
        self._schedule(node)

    def _link(self, node: Node, pipe: Pipe, dialled: bool) -> None:
        other = pipe.other(node)
        credential = member(other.number)[1]
        actions = node.mesh.linked(
            other.id, other.incarnation, credential, dialled=dialled, now=self.now
        )
        if isinstance(first := actions[0], Drop):
            if first.is_newcomer:
                old, node.pipes[other.id] = node.pipes.get(other.id), pipe
                self.send(node, pipe, encode(Bye(first.why)))
                self._close(node, pipe)
                if old:
                    node.pipes[other.id] = old
                return
            self.act(node, actions[:1])
            actions = actions[1:]
        node.pipes[other.id] = pipe
        self.act(node, actions)


def disagreement(world: World) -> str | None:
    """Return how the living members disagree; None if they agree."""
    members = world.members
    here = frozenset(node.id for node in members)
    for node in members:
        if node.mesh.alive != here:
            return f"node {node.number} holds {names(node.mesh.alive)} alive, not {names(here)}"
        if node.mesh.links.keys() != here - {node.id}:
            return f"node {node.number} is linked to {names(node.mesh.links)} of {names(here)}"
        if {peer for peer, _ in node.mesh.states[node.id].links} != here - {node.id}:
            return f"node {node.number} names other links than it has"
    for one, other in combinations(members, 2):
        if one.pipes[other.id] is not other.pipes[one.id]:
            return f"nodes {one.number} and {other.number} each have a link of their own"
        if known(one, here) != known(other, here):
            return f"nodes {one.number} and {other.number} do not know the same"
    return lost_term(world)


def lost_term(world: World) -> str | None:
    """Return a charter term that only one node changed and that lacks its value."""
    for name, wishes in world.wishes.items():
        node, value = wishes[0]
        is_alone = len(wishes) == 1 and node in world.members
        if is_alone and getattr(node.mesh.charter, name) != value:
            return f"node {node.number} alone changed `{name}`, which is not {value}"
    return None


def known(node: Node, here: frozenset[NodeId]) -> tuple[object, ...]:
    """Return everything that a node knows about these nodes and the mesh."""
    mesh = node.mesh
    records = [(mesh.profiles[node], mesh.states[node]) for node in sorted(here)]
    return mesh.digest, mesh.charter, dict(mesh.removals), records


def names(nodes: Iterable[NodeId]) -> list[int]:
    """Name nodes by their numbers."""
    numbers = {member(number)[0].node: number for number in range(MOST)}
    return sorted(numbers[node] for node in nodes)
