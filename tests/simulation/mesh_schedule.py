"""Meshes of machines on an unreliable network with a manual clock; one seed determines everything.

    python -m tests.simulation.mesh_schedule --schedules 1000000 --seed 7

A schedule starts some nodes and injects all kinds of faults for a while: nodes crash with and
without notice, pause, leave, restart (also with a lost incarnation), lose links, are partitioned in
one direction or both, get duplicates and late messages, see their wall clock jump, change the
charter concurrently, and remove each other. Then the network heals, and within `BOUND` seconds all
living nodes must agree, be linked to each other and list no other node.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

from meshllm.protocol.membership.records import StateRecord
from tests.simulation.mesh_world import Network, Node, World, disagreement, remembered_signatures

BOUND = 90.0  # s from the last fault to agreement: two dials at the longest pause, and some

Hook = Callable[[World, Node], None]
"""Callback for each Changed of a machine."""


class Schedule:
    """One world, its faults, and whether it recovered."""

    def __init__(self, seed: int, on_changed: Hook | None = None) -> None:
        self.world = World(seed, on_changed)
        self.random = self.world.random
        self.nodes = self.random.choice((2, 2, 3, 3, 3, 4, 4, 5, 6))
        self.has_removed = False

    def run(self) -> str | None:
        """Run the schedule; return what is wrong at the end."""
        world, random = self.world, self.random
        for number in range(self.nodes):
            world.at(random.uniform(0, 2), partial(world.start, number))
        for _ in range(random.randint(1, 7)):
            world.at(random.uniform(1, 9), self._fault)
        world.run(9 + random.uniform(0, 3))
        self._heal()
        end = world.now + BOUND
        while world.now < end and (disagreement(world) or world.now < end - BOUND + 1):
            world.run(1.0)
        return disagreement(world)

    def _heal(self) -> None:
        world = self.world
        world.network = Network()
        for node in world.living:
            world.resume(node)
        if not world.living:
            world.start(0)

    def _fault(self) -> None:
        faults = (
            self._crash,
            self._crash,
            self._pause,
            self._leave,
            self._cut,
            self._cut,
            self._lose,
            self._jump,
            self._charter,
            self._rivals,
            self._publish,
            self._remove,
        )
        if self.world.living:
            self.random.choice(faults)(self.random.choice(self.world.living))

    def _crash(self, node: Node) -> None:
        self.world.crash(node, silently=self.random.random() < 0.5)
        self._restart(node)

    def _leave(self, node: Node) -> None:
        if not node.is_paused:
            self.world.leave(node)
            self._restart(node)

    def _restart(self, node: Node) -> None:
        forgets = self.random.random() < 0.2
        if self.random.random() < 0.7:
            again = partial(self.world.start, node.number, forgets=forgets)
            self.world.at(self.random.uniform(0.1, 5), again)

    def _pause(self, node: Node) -> None:
        if not node.is_paused:
            self.world.pause(node, self.random.uniform(0.1, 8))

    def _cut(self, _: Node) -> None:
        """Partition the nodes into two halves, in one direction or both."""
        network = self.world.network
        here = set(self.random.sample(range(self.nodes), self.random.randint(1, self.nodes - 1)))
        both = self.random.random() < 0.7
        for way in ((a, b) for a in here for b in range(self.nodes) if b not in here):
            network.loss[way] = 1.0
            if both:
                network.loss[way[::-1]] = 1.0
        self.world.at(self.random.uniform(0.5, 8), network.loss.clear)

    def _lose(self, node: Node) -> None:
        network = self.world.network
        other = self.random.randrange(self.nodes)
        network.loss[node.number, other] = self.random.uniform(0.1, 0.9)
        network.duplicates = self.random.uniform(0, 0.5)
        network.slowest_s = self.random.uniform(0.01, 0.6)

    def _jump(self, node: Node) -> None:
        node.jump_s += self.random.uniform(-1e9, 1e9)

    def _charter(self, node: Node) -> None:
        if not node.is_paused:
            self.world.charter(node)

    def _rivals(self, _: Node) -> None:
        """Let two nodes change two terms at the same time."""
        nodes = [node for node in self.world.living if not node.is_paused]
        self.world.charter(*self.random.sample(nodes, min(2, len(nodes))))

    def _publish(self, node: Node) -> None:
        if not node.is_paused:
            state = node.mesh.states.get(node.id, StateRecord())
            state = replace(state, is_loaded=self.random.random() < 0.5)
            self.world.act(node, node.mesh.publish(state=state, now=self.world.now))

    def _remove(self, node: Node) -> None:
        victim = self.random.randrange(self.nodes)
        if not (node.is_paused or self.has_removed or victim == node.number):
            self.has_removed = True
            self.world.remove(node, victim)


def main() -> None:
    """Run schedules, and stop at the first that goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = perf_counter()
    with remembered_signatures():
        for seed in range(arguments.seed, arguments.seed + arguments.schedules):
            if wrong := Schedule(seed).run():
                sys.exit(f"seed {seed}: {wrong}")
    print(f"{arguments.schedules} schedules in {perf_counter() - start:.1f} s: all agree")


if __name__ == "__main__":
    main()
