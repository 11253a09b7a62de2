"""Whole nodes on a bad network in virtual time; everything follows from one seed.

    python -m tests.simulation.node_world --schedules 1000000 --seed 7

A schedule starts some nodes, asks them for texts at random times, and lets them fail in every way
for a while: they are killed, lose their power, pause, leave, come back with their key, are cut off
in one direction or both, or are far from each other. Then all faults end, and within `BOUND` every
request has ended in the right text or in an error of ours, all nodes follow one plan, its ring
stands, nothing is left of what was, and each node answers a fresh request.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from blake3 import blake3

from meshllm.errors import LinkLost, MeshError, TimedOut
from meshllm.names import Span
from meshllm.node.node import MeshNode, open_node
from meshllm.node.options import NodeOptions
from meshllm.node.worker import Worker
from meshllm.protocol.identity import show, verify
from meshllm.request import Answer, Piece, Request, Sampling
from meshllm.testing.clock import InlineExecutor
from tests.simulation.faulty import Machines, Network, Process, address_of, process_here
from tests.simulation.mesh_world import member
from tests.simulation.toy import LAYERS, ToyPreparation, memory_for, reference

BOUND = 120.0  # s from the last fault until all is well
LEAVE_S = 10.0  # s for all to leave
TASKS, TASKS_OF_LINK, TASKS_OF_RING, TASKS_OF_DIAL = 10, 5, 8, 4  # of a node that is at rest
FRESH_S = 5.0  # s for a request when all is well
MOST_TOKENS = 10

P = ParamSpec("P")
T = TypeVar("T")


class ToyWorker(Worker):
    """A compute thread for which each job takes a while, in virtual time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(InlineExecutor())
        self._seconds = seconds
        self._turn = asyncio.Lock()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._turn:
            await asyncio.sleep(self._seconds)
            return function(*args, **kwargs)


@dataclass(eq=False)
class Asked:
    """A request and what became of it."""

    number: int
    process: Process
    request: Request
    at: float
    cancel_at: int | None
    """After so many pieces."""
    text: str = ""
    outcome: str = ""
    """Empty while it is under way."""


@dataclass(eq=False)
class Running:
    """One run of a node."""

    process: Process
    task: "asyncio.Task[None]"
    node: MeshNode | None = None
    asked: "list[asyncio.Task[None]]" = field(default_factory=list)


class World:
    """Machines, a network, nodes, and what is to be said of them."""

    def __init__(self, seed: int, home: Path) -> None:
        self.random = Random(seed)
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, Machines)
        self.machines: Machines = self.loop
        self.network = Network(self.loop, self.random)
        self.home = home
        self.capacity: dict[int, int] = {}
        self.policy: str | None = None
        self.members: int | None = None
        self.running: dict[int, Running] = {}
        self.asked: list[Asked] = []
        self.history: list[str] = []
        self.coming = 0
        """Nodes that are to come back."""
        self.is_over = False
        """No node starts any more."""
        self.wrong: list[str] = []
        """What should never be."""

    def note(self, text: str) -> None:
        self.history.append(f"{self.loop.time():8.3f} {text}")

    def fault(self, text: str) -> None:
        self.note(f"WRONG: {text}")
        self.wrong.append(text)

    @property
    def nodes(self) -> dict[int, MeshNode]:
        return {number: at.node for number, at in self.running.items() if at.node}

    # What happens to nodes

    def start(self, number: int) -> None:
        """Start a node, or start it again with its key."""
        if number in self.running or self.is_over:
            return
        self.note(f"start {number}")
        if number in self.network.dark:
            self.network.dark.discard(number)
            if self.random.random() < 0.5:
                self.network.reset(number)
        process = Process(number)
        self._furnish(number)
        task = self.loop.create_task(self._live(process), context=process.context)
        self.running[number] = Running(process, task)

    async def _live(self, process: Process) -> None:
        number = process.number
        options = NodeOptions(
            self.home / str(number),
            name=f"n{number}",
            memory_bytes=memory_for(self.capacity[number]),
            discovery=False,
            threads=1,
            policy=self.policy if number == 0 else None,
            members=self.members if number == 0 else None,
        )
        worker = ToyWorker(0.001 + 0.03 * self.random.random())
        try:
            async with open_node(
                options, self.network.seat(process), worker, ToyPreparation
            ) as node:
                self.running[number].node = node
                await node.stopped
        except MeshError as error:
            self.fault(f"{number} ended: {error!r}")
        if self.running[number].process is process:
            self.note(f"{number} has ended")
            del self.running[number]
            if process.ends:
                self.fault(f"{number} left, and leaves {len(process.ends)} links open")
            self.network.kill(process, silently=False)

    def _furnish(self, number: int) -> None:
        folder = self.home / str(number)
        if folder.exists():
            return
        folder.mkdir(mode=0o700)
        credential = member(number)[1]
        (folder / "node.key").write_text(blake3(b"member %d" % number).hexdigest())
        peers = {
            member(other)[0].node.hex(): [address_of(other)]
            for other in self.capacity
            if other != number
        }
        content = {"credential": credential.encode().hex(), "peers": peers}
        (folder / "mesh.json").write_text(json.dumps(content))

    def crash(self, number: int, *, silently: bool) -> None:
        """Kill a node, or take its power."""
        if not (at := self.running.pop(number, None)):
            return
        self.note(f"{'power cut of' if silently else 'kill'} {number}")
        self.network.kill(at.process, silently=silently)
        if silently:
            self.network.dark.add(number)
        self.machines.resume(at.process)
        for task in (*at.asked, at.task):
            task.cancel()
        for one in self.asked:
            if one.process is at.process:
                one.outcome = one.outcome or "its ingress died"
        self.loop.create_task(self._bury(at))

    async def _bury(self, at: Running) -> None:
        await asyncio.gather(at.task, *at.asked, return_exceptions=True)
        await asyncio.sleep(0.1)
        if at.process.tasks:
            self.fault(f"{at.process.number} was killed, and leaves {at.process.tasks}")

    def leave(self, number: int) -> None:
        """Tell a node to finish and go."""
        at = self.running.get(number)
        if at and at.node and not at.process.is_paused:
            self.note(f"{number} is told to leave")
            at.process.context.copy().run(at.node.leave)

    def pause(self, number: int, seconds: float) -> None:
        """Let a process not run for a while."""
        at = self.running.get(number)
        if at and not at.process.is_paused:
            self.note(f"pause {number} for {seconds:.1f} s")
            at.process.is_paused = True
            self.loop.call_later(seconds, self._resume, at.process)

    def _resume(self, process: Process) -> None:
        if process.is_paused:
            self.note(f"{process.number} goes on")
            self.machines.resume(process)

    def cut(self, ways: list[tuple[int, int]], seconds: float) -> None:
        """Let nothing through for a while."""
        self.note(f"cut {ways} for {seconds:.1f} s")
        self.network.cuts.update(ways)
        self.loop.call_later(seconds, self._mend, ways)

    def _mend(self, ways: list[tuple[int, int]]) -> None:
        self.note(f"mend {ways}")
        self.network.heal(*ways)

    # Requests

    def ask(self, number: int, *, may_cancel: bool = True) -> Asked | None:
        """Ask a node for a text."""
        at = self.running.get(number)
        if at is None or at.node is None:
            return None
        random = self.random
        sampling = Sampling(temperature=random.choice((0.0, 0.8)), seed=random.randrange(1000))
        raw = "".join(random.choice("abcdefgh") for _ in range(random.randint(1, 12)))
        request = Request(raw=raw, sampling=sampling, max_tokens=random.randint(1, MOST_TOKENS))
        cancel_at = random.randint(0, 4) if may_cancel and random.random() < 0.25 else None
        asked = Asked(number, at.process, request, self.loop.time(), cancel_at)
        self.asked.append(asked)
        self.note(f"ask {number}: {raw!r}, {request.max_tokens} tokens, request {len(self.asked)}")
        work = self._answer(at.node, asked, len(self.asked))
        at.asked.append(self.loop.create_task(work, context=at.process.context.copy()))
        return asked

    async def _answer(self, node: MeshNode, asked: Asked, serial: int) -> None:
        try:
            asked.outcome = await self._read(node, asked)
        except MeshError as error:
            asked.outcome = type(error).__name__
            if not fits(error):
                self.fault(f"request {serial} ended with {error!r}")
            self.note(f"request {serial}: {error!r}")
        else:
            self.note(f"request {serial}: {asked.outcome}, {asked.text!r}")

    async def _read(self, node: MeshNode, asked: Asked) -> str:
        text, tokens = reference(asked.request)
        pieces = 0
        async with aclosing(node.desk.generate(asked.request)) as events:
            async for event in events:
                if isinstance(event, Piece):
                    asked.text += event.text
                    pieces += 1
                if pieces == asked.cancel_at:
                    return "cancelled"
                if not text.startswith(asked.text):
                    self.fault(f"{asked.text!r} is not the beginning of {text!r}")
                if isinstance(event, Answer):
                    if (event.text, event.tokens, asked.text) != (text, tokens, text):
                        self.fault(f"{asked.text!r}, {event} and not {text!r}")
                    if not tiles([hop.span for hop in event.hops], whole=False):
                        self.fault(f"{event.hops} do not tile the layers")
                    return "answered"
        return "ended without an answer"

    # What is to be in the end

    def unsettled(self) -> str | None:
        """Say what is not yet as it is to be; None when all is well."""
        if self.coming or len(self.nodes) < len(self.running):
            return "not all nodes have come back"
        if any(not one.outcome for one in self.asked):
            return "requests are under way"
        return self._strangers() or (self._no_ring() if self.fits else None) or self._left_over()

    def _strangers(self) -> str | None:
        here = {node.me for node in self.nodes.values()}
        for number, node in self.nodes.items():
            if node.machine.alive != here:
                return f"{number} holds {len(node.machine.alive)} alive, not {len(here)}"
            if node.links.lines.keys() != here - {node.me}:
                return f"{number} has {len(node.links.lines)} links"
        return None

    @property
    def fits(self) -> bool:
        """Whether the nodes that are here can hold the model."""
        return sum(self.capacity[number] for number in self.nodes) >= LAYERS

    def _no_ring(self) -> str | None:
        plans = {number: node.standing.plan for number, node in self.nodes.items()}
        for number, plan in plans.items():
            node = self.nodes[number]
            if plan is None:
                return f"{number} follows no plan: {node.standing.reason()}"
            if plan != plans[min(plans)]:
                return f"{number} follows another plan"
            if not tiles([stage.span for stage in plan.stages]):
                self.fault(f"{plan} does not tile the layers")
            if node.standing.standing_entry() is None:
                return f"{number} sees no ring"
            service = node.standing.service
            is_rank = plan.rank(node.me) is not None
            if not service or is_rank is not bool(service.entry or service.stage):
                return f"{number} {'is not' if is_rank else 'is'} at work"
        return None

    def _left_over(self) -> str | None:
        for number, node in self.nodes.items():
            if node.desk._calls or node.desk._served or node.desk.counts.active:
                return f"{number} has requests on its desk"
            if node.standing.sessions:
                return f"{number} has {node.standing.sessions} sessions"
            process, links = self.running[number].process, len(self.nodes) - 1
            plan = node.standing.plan
            is_linked = plan is not None and len(plan.stages) > 1 and plan.rank(node.me) is not None
            if len(process.ends) != links + 2 * is_linked:
                return f"{number} has {len(process.ends)} links, of the ring and others"
            dials = len(self.capacity) - 1 - links
            most = TASKS + TASKS_OF_LINK * links + TASKS_OF_RING + TASKS_OF_DIAL * dials
            if len(process.tasks) > most:
                return f"{number} has {len(process.tasks)} tasks, more than {most}"
        return None


def fits(error: MeshError) -> bool:
    """Tell whether a request may end so."""
    return isinstance(error, LinkLost | TimedOut)


def tiles(spans: list[Span], *, whole: bool = True) -> bool:
    """Tell whether spans are all layers, or the first of them, each once, in order."""
    layers = [layer for span in spans for layer in range(span.start, span.stop)]
    return layers == [*range(LAYERS if whole else len(layers))]


class Schedule:
    """One world and what goes wrong in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random = world.random
        self.count = random.choice((2, 2, 3, 3, 3, 4, 5))
        capacities = (2, 2, 2, 3, 4)
        world.capacity = {number: random.choice(capacities) for number in range(self.count)}
        world.policy = random.choice((None, "fastest", "proportional", "throughput"))
        world.members = random.choice((None, None, 2, 3))
        world.network.jitter_s = random.choice((0.0, 0.0, 0.002, 0.05))
        if random.random() < 0.3:
            for one in range(self.count):
                for other in range(self.count):
                    world.network.delay_s[one, other] = random.choice((0.001, 0.02, 0.1))

    async def run(self) -> None:
        """Run it all."""
        world, random, loop = self.world, self.random, self.world.loop
        for number in range(self.count):
            loop.call_later(random.uniform(0, 3), world.start, number)
        end = random.uniform(8, 16)
        for _ in range(random.randint(0, 5)):
            loop.call_later(random.uniform(0.5, end), self._fault)
        for _ in range(random.randint(1, 6)):
            loop.call_later(random.uniform(1, end), self._ask)
        await asyncio.sleep(end)
        self._heal()
        await self._settle()
        if not world.wrong:
            await self._ask_all()
        if not world.wrong:
            await self._all_leave()
        for number in list(world.running):
            world.crash(number, silently=False)
        await asyncio.sleep(1.0)

    def _ask(self) -> None:
        if self.world.nodes:
            self.world.ask(self.random.choice(sorted(self.world.nodes)))

    def _fault(self) -> None:
        running = sorted(self.world.running)
        if running:
            faults = self._crash, self._crash, self._leave, self._pause, self._pause, self._cut
            self.random.choice(faults)(self.random.choice(running))

    def _crash(self, number: int) -> None:
        self.world.crash(number, silently=self.random.random() < 0.5)
        self._restart(number)

    def _leave(self, number: int) -> None:
        self.world.leave(number)
        self._restart(number)

    def _restart(self, number: int) -> None:
        if self.random.random() < 0.7:
            self.world.coming += 1
            self.world.loop.call_later(self.random.uniform(0.1, 6), self._back, number)

    def _back(self, number: int) -> None:
        self.world.coming -= 1
        self.world.start(number)

    def _pause(self, number: int) -> None:
        self.world.pause(number, self.random.uniform(0.1, 6))

    def _cut(self, _: int) -> None:
        here = set(self.random.sample(range(self.count), self.random.randint(1, self.count - 1)))
        ways = [(a, b) for a in sorted(here) for b in range(self.count) if b not in here]
        if self.random.random() < 0.6:
            ways += [way[::-1] for way in ways]
        self.world.cut(ways, self.random.uniform(0.5, 8))

    def _heal(self) -> None:
        world = self.world
        world.note("all faults end")
        world.network.heal(*world.network.cuts)
        for at in world.running.values():
            world._resume(at.process)
        if not any(node.machine.charter for node in world.nodes.values()):
            world.start(0)

    async def _settle(self) -> None:
        world = self.world
        until = world.loop.time() + BOUND
        text: str | None = ""
        while world.loop.time() < until:
            await asyncio.sleep(1.0)
            if world.wrong or (text := world.unsettled()) is None:
                world.note("all is well")
                return
        world.fault(f"after {BOUND:.0f} s {text}")

    async def _ask_all(self) -> None:
        world = self.world
        if world.fits:
            before = len(world.asked)
            for number in sorted(world.nodes):
                world.ask(number, may_cancel=False)
            await asyncio.sleep(FRESH_S)
            for one in world.asked[before:]:
                if one.outcome != "answered":
                    world.fault(f"a fresh request at {one.number}: {one.outcome or 'no answer'}")
            await self._settle()  # the plan may change now that the entry is calm

    async def _all_leave(self) -> None:
        world = self.world
        world.is_over = True
        for number in list(world.running):
            world.leave(number)
        await asyncio.sleep(LEAVE_S)
        if world.running:
            world.fault(f"{sorted(world.running)} do not leave")


class Ear(logging.Handler):
    """Takes what nodes log into the history; bugs that they caught are faults."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        owner = process_here()
        text = f"{owner.number if owner else '-'}: {record.getMessage()}"
        if record.levelno < logging.ERROR:
            self._world.note(text)
        else:
            self._world.fault(self.format(record))


@contextmanager
def shortcuts() -> Iterator[None]:
    """Leave out what takes time and changes nothing: to verify twice, and to wait for the disk."""
    with (
        patch("meshllm.protocol.gossip.verify", lru_cache(8192)(verify)),
        patch("meshllm.protocol.credential.verify", lru_cache(8192)(verify)),
        patch("meshllm.protocol.identity.show", lru_cache(64)(show)),
        patch("os.fsync", lambda _: None),
    ):
        yield


def simulate(seed: int) -> World:
    """Run one schedule; the world tells what went wrong."""

    async def main() -> World:
        world = World(seed, Path(home))
        world.loop.set_exception_handler(lambda _, told: world.fault(f"unhandled: {told}"))
        handler = Ear(world)
        logger = logging.getLogger("meshllm")
        logger.addHandler(handler)
        try:
            await Schedule(world).run()
        finally:
            logger.removeHandler(handler)
        return world

    shared = Path("/dev/shm")  # faster than a disk, where there is one
    parent = shared if os.access(shared, os.W_OK) else None
    with (
        TemporaryDirectory(dir=parent) as home,
        asyncio.Runner(loop_factory=Machines) as runner,
    ):
        return runner.run(main())


def main() -> None:
    """Run schedules, and stop at the first that goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the history of each")
    arguments = parser.parse_args()
    logging.getLogger("meshllm").propagate = False
    logging.getLogger("meshllm").setLevel("DEBUG" if arguments.show else "ERROR")
    start, bad = perf_counter(), 0
    with shortcuts():
        for seed in range(arguments.seed, arguments.seed + arguments.schedules):
            world = simulate(seed)
            if world.wrong or arguments.show:
                print(f"seed {seed}: {world.wrong}")
            if arguments.show or (world.wrong and not arguments.keep_going):
                print("\n".join(world.history))
            if world.wrong:
                bad += 1
                if not arguments.keep_going:
                    sys.exit(1)
    print(f"{arguments.schedules} schedules in {perf_counter() - start:.1f} s: {bad} go wrong")


if __name__ == "__main__":
    main()
