"""Machines, a network, and whole nodes on them."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ParamSpec, TypeVar

from meshllm.errors import MeshError, NotAuthorised
from meshllm.names import show
from meshllm.node.compute.worker import SHORT_HANG_S, Worker
from meshllm.node.control import control_of
from meshllm.node.node import MeshNode, open_node
from meshllm.node.options import InferenceConfig, ModelOptions, NodeOptions
from meshllm.protocol.ring import hang
from meshllm.protocol.trust.credential import Role
from meshllm.testing.clock import InlineExecutor
from tests.simulation.asking import Asked, draw_request, read
from tests.simulation.faulty import Network, address_of
from tests.simulation.machines import Machines, Process
from tests.simulation.members import Members, Ticket
from tests.simulation.mesh_world import member
from tests.simulation.plans import Plans
from tests.simulation.toy import ToyPreparation, layers_after, memory_for

P = ParamSpec("P")
T = TypeVar("T")

OUT_S = 12  # s at most that others follow a plan with a hung node; plans and disks are slow
TIMERS = ("_expire", "_schedule_planning")
BUG_S = 3  # s at most that a node keeps running after a bug


class Bug(Exception):
    """A bug that was injected on purpose."""


def meet_bug() -> None:
    """Replace a callback."""
    raise Bug


class ToyWorker(Worker):
    """A compute thread whose jobs take a while in virtual time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(InlineExecutor())
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._held: list[Callable[[], None]] = []

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._turn:
            await asyncio.sleep(self._seconds)
            await self._goes_on.wait()
            return function(*args, **kwargs)

    def follow(self, function: Callable[..., T], *args: Any) -> Future[T]:
        if self._goes_on.is_set():
            return super().follow(function, *args)
        later: Future[T] = Future()
        if not self._held:  # it runs, and does not end
            self._running = self._now(), self._now() + hang.HANG_S

        def run() -> None:
            if later.set_running_or_notify_cancel():
                later.set_result(self._timed(SHORT_HANG_S, function, *args))

        self._held.append(run)
        return later

    def _timed(self, hang_s: float, function: Callable[..., T], *args: Any) -> T:
        running = self._running if self._held else None  # what hangs is still what runs
        try:
            return super()._timed(hang_s, function, *args)
        finally:
            self._running = running

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def holds(self) -> bool:
        """Whether a job hangs."""
        return bool(self._held)

    def hang(self) -> None:
        """Hang from now on."""
        self._goes_on.clear()

    def go_on(self) -> None:
        """Run the waiting jobs."""
        self._goes_on.set()
        self._running = None
        held, self._held = self._held, []
        for each in held:
            each()


@dataclass(eq=False)
class Running:
    """One run of a node."""

    process: Process
    task: "asyncio.Task[None]"
    worker: ToyWorker
    node: MeshNode | None = None
    """None until it is a member."""
    asked: "list[asyncio.Task[None]]" = field(default_factory=list)
    buggy_s: int | None = None
    """How long it has run after a bug; None without a bug."""
    hung_s: int | None = None
    """How long a job has hung on its compute thread; None if it does not hang."""

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in the context of this process."""
        return self.process.context.copy().run(function, *args, **kwargs)


class World:
    """The simulated world and its history."""

    def __init__(self, seed: int, home: Path) -> None:
        self.random = Random(seed)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Machines)
        self.loop: Machines = loop
        self.network = Network(loop, self.random)
        self.members = Members(home, self.fault, loop.latest_s)
        self.plans = Plans(self.fault)
        self.capacity: dict[int, int] = {}
        """Layers for which a machine has room; lists every machine."""
        self.newcomers: set[int] = set()
        """Machines that join with a ticket."""
        self.policy: str | None = None
        self.ring_size: int | None = None
        self.names: dict[int, str] = {}
        """Names of nodes; several may be equal."""
        self.prefer: tuple[str, ...] | None = None
        self.exclude: tuple[str, ...] | None = None
        self.models: tuple[str, ...] = ("",)
        """The models for which nodes are asked."""
        self.replicas: int | None = None
        """Of the first model."""
        self.think_s = 0.0
        """How long nodes plan."""
        self.disk_s = 0.0
        """How long they wait for the disk."""
        self.running: dict[int, Running] = {}
        self.asked: list[Asked] = []
        self.history: list[str] = []
        self.coming = 0
        """Nodes that will be restarted."""
        self.is_calm = True
        """No node has ended, hung, run out of memory or been removed; no message was delayed."""
        self.is_over = False
        """No more nodes are started."""
        self.wrong: list[str] = []
        """Violated invariants."""

    def note(self, text: str) -> None:
        self.history.append(f"{self.loop.time():8.3f} {text}")

    def fault(self, text: str) -> None:
        self.note(f"WRONG: {text}")
        self.wrong.append(text)

    def unhandled(self, _: object, told: dict[str, Any]) -> None:
        """Handle an exception that no task awaits, as the last handler."""
        if not isinstance(told.get("exception"), Bug):
            self.fault(f"unhandled: {told}")

    @property
    def nodes(self) -> dict[int, MeshNode]:
        return {number: at.node for number, at in self.running.items() if at.node}

    # Start and end of nodes

    def start(self, number: int) -> None:
        """Start a node, or start it again with its key."""
        if number in self.running or self.is_over:
            return
        if number in self.newcomers:
            if number not in self.members.tickets:
                return
        elif number not in self.members.credentials:
            others = self.capacity.keys() - self.newcomers - {number}
            self.members.settle(number, sorted(others))
        self.note(f"start {number}")
        if number in self.network.dark:
            self.network.dark.discard(number)
            if self.random.random() < 0.5:
                self.network.reset(number)
        process = Process(number)
        worker = process.context.run(ToyWorker, 0.001 + 0.03 * self.random.random())
        task = self.loop.create_task(self._live(process, worker), context=process.context)
        self.running[number] = Running(process, task, worker)

    async def _live(self, process: Process, worker: ToyWorker) -> None:
        number = process.number
        ticket = self.members.tickets.get(number)
        options = NodeOptions(
            self.members.folder(number),
            name=self.names.get(number, f"n{number}"),
            inference=InferenceConfig(threads=1, memory_bytes=memory_for(self.capacity[number])),
            discovery=False,
            join=ticket.text if ticket else None,
            policy=self.policy if number == 0 else None,
            members=self.ring_size if number == 0 else None,
            prefer=self.prefer if number == 0 else None,
            exclude=self.exclude if number == 0 else None,
            replicas=self.replicas if number == 0 else None,
        )
        seat = self.network.seat(process)
        try:
            async with open_node(options, seat, worker, ToyPreparation, self._off_loop) as node:
                self.running[number].node = node
                self._came(number, node)
                await node.stopped
        except MeshError as error:
            self._refused(number, error)
        except Bug:
            self._forsake(self.running[number])
        except Exception as error:  # a bug that was not injected
            self.fault(f"{number} ended: {error!r}")
        if self.running[number].process is process:
            self.note(f"{number} has ended")
            del self.running[number]
            if process.ends:
                self.fault(f"{number} left, and leaves {len(process.ends)} links open")
            self.network.kill(process, silently=False)

    async def _off_loop(self, function: Callable[..., T], /, *args: Any) -> T:
        is_planning = function.__module__.startswith("meshllm.protocol")
        if seconds := self.think_s if is_planning else self.disk_s:
            await asyncio.sleep(seconds)
        return function(*args)

    def _came(self, number: int, node: MeshNode) -> None:
        credential = node.store.credential
        assert credential is not None
        self.members.credentials[number] = credential

    def _refused(self, number: int, error: MeshError) -> None:
        if isinstance(error, NotAuthorised) and self.members.may_be_refused(number):
            self.note(f"{number} is refused: {error}")
            self._forsake(self.running[number])
        else:
            self.fault(f"{number} ended: {error!r}")

    def _forsake(self, at: Running) -> None:
        for task in at.asked:
            task.cancel()
        for one in self.asked:
            if one.process is at.process:
                one.outcome = one.outcome or "its ingress died"

    def crash(self, number: int, *, silently: bool) -> None:
        """Kill a node, or cut its power."""
        if number not in self.running:
            return
        at, self.is_calm = self.running.pop(number), False
        self.note(f"{'power cut of' if silently else 'kill'} {number}")
        self.network.kill(at.process, silently=silently)
        if silently:
            self.network.dark.add(number)
        self.loop.resume(at.process)
        at.task.cancel()
        self._forsake(at)
        self.loop.create_task(self._bury(at))

    async def _bury(self, at: Running) -> None:
        await asyncio.gather(at.task, *at.asked, return_exceptions=True)
        await asyncio.sleep(0.1)
        if at.process.tasks:
            self.fault(f"{at.process.number} was killed, and leaves {at.process.tasks}")

    def leave(self, number: int) -> None:
        """Let a node finish and leave."""
        at = self.running.get(number)
        if at and at.node and not at.process.is_paused:
            self.is_calm = False
            self.note(f"{number} is told to leave")
            at.call(at.node.leave)

    def break_(self, number: int, name: str) -> None:
        """Let a timer of a node hit a bug, which must end it."""
        at = self.running.get(number)
        if at and at.node and at.buggy_s is None:
            self.is_calm, at.buggy_s = False, 0
            self.note(f"{number} meets a bug in `{name}`")
            setattr(at.node.links._timer if name == "_expire" else at.node, name, meet_bug)
            at.call(at.node.changed)

    def look_for_bugs(self) -> None:
        """Check, once a second, whether a node keeps running after a bug."""
        for number, at in self.running.items():
            if at.buggy_s is not None and not at.process.is_paused:
                at.buggy_s += 1
                if at.buggy_s > BUG_S:
                    self.fault(f"{number} met a bug, and goes on")

    def hang(self, number: int, seconds: float) -> None:
        """Let the compute thread of a node hang for a while."""
        at = self.running.get(number)
        if at and at.node and at.hung_s is None:
            self.is_calm, at.hung_s = False, 0
            self.note(f"{number} hangs for {seconds:.1f} s")
            at.call(at.worker.hang)
            self.loop.call_later(seconds, self.go_on, at)

    def go_on(self, at: Running) -> None:
        """Let a compute thread continue."""
        if at.hung_s is not None:
            self.note(f"{at.process.number} hangs no more")
            at.hung_s = None
            at.call(at.worker.go_on)

    def look_for_hangs(self) -> None:
        """Check, once a second, whether others wait for a hung node."""
        for number, at in self.running.items():
            if at.hung_s is None or at.process.is_paused or self.network.cuts:
                continue
            if not at.worker.holds:
                continue
            at.hung_s += 1
            key = member(number)[0].node
            for other, node in self.nodes.items():
                plan = node.ring_member.plan
                # One that has lost it may wait for it to come back.
                is_here = key in node.machine.alive and not self.running[other].process.is_paused
                if at.hung_s > OUT_S and plan and plan.rank(key) is not None and is_here:
                    self.fault(f"{number} hangs, and {other} follows a plan with it")

    # Membership

    def invite(self, inviter: int, *, lasts_s: float | None, uses: int | None) -> Ticket:
        """Let a node make a ticket."""
        at = self.running[inviter]
        assert at.node is not None
        return Ticket(self._at_once(at, at.node.invite(Role.NODE, lasts_s, uses)), inviter, uses)

    def serve(self, number: int, asked: ModelOptions) -> None:
        """Let a node serve another model."""
        at = self.running[number]
        if at.node is not None and at.buggy_s is None:
            self.note(f"{number} serves {asked}")
            self.models = ("", asked.model)
            work = self._serve(at.node, asked)
            at.asked.append(self.loop.create_task(work, context=at.process.context.copy()))

    async def _serve(self, node: MeshNode, asked: ModelOptions) -> None:
        try:
            await node.charter_editor.serve_model(asked)
        except MeshError as error:
            self.note(f"it is not served: {error}")

    def remove(self, number: int, gone: int) -> None:
        """Let a node remove another, if it knows of it."""
        at, key = self.running[number], member(gone)[0].node
        if at.node is None or at.buggy_s is not None or key not in at.node.machine.profiles:
            return
        self.is_calm = False
        self.note(f"{number} removes {gone}")
        self._at_once(at, control_of(at.node).remove(show(key)))
        self.members.remover = number
        self.members.removals = dict(at.node.machine.removals)

    def _at_once(self, at: Running, command: Coroutine[Any, Any, T]) -> T:
        """Let a node execute a command that waits for its disk only, which takes no time."""
        disk_s, self.disk_s = self.disk_s, 0.0
        try:
            at.call(command.send, None)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            self.disk_s = disk_s
        raise AssertionError("it waits for something else")

    def acquaint(self) -> None:
        """Send each node the addresses of the others, as a beacon does."""
        for at in self.running.values():
            for other in self.nodes:
                if at.node is not None and other != at.process.number:
                    at.call(at.node.links.hint, member(other)[0].node, [address_of(other)])

    # Faults

    def pause(self, number: int, seconds: float) -> None:
        """Pause a process for a while."""
        at = self.running.get(number)
        if at and not at.process.is_paused:
            self.is_calm = False
            self.note(f"pause {number} for {seconds:.1f} s")
            at.process.is_paused = True
            self.loop.call_later(seconds, self.resume, at.process)

    def resume(self, process: Process) -> None:
        """Resume a process, if it is paused."""
        if process.is_paused:
            self.note(f"{process.number} goes on")
            self.loop.resume(process)

    def cut(self, ways: list[tuple[int, int]], seconds: float) -> None:
        """Cut paths for a while."""
        self.is_calm = False
        self.note(f"cut {ways} for {seconds:.1f} s")
        self.network.cuts.update(ways)
        self.loop.call_later(seconds, self._mend, ways)

    def _mend(self, ways: list[tuple[int, int]]) -> None:
        self.note(f"mend {ways}")
        self.network.heal(*ways)

    def starve(self, number: int, room: int, seconds: float) -> None:
        """Let other programs of a machine leave memory for so many layers only, for a while."""
        self.is_calm = False
        self.note(f"{number} has memory for {room} layers, for {seconds:.1f} s")
        self.loop.room[number] = room
        self.loop.call_later(seconds, self.relieve, number)

    def relieve(self, number: int) -> None:
        """Let a machine have all of its memory again."""
        if self.loop.room.pop(number, None) is not None:
            self.note(f"{number} has its memory again")

    def room(self, number: int) -> int:
        """Return for how many layers a node that ran out of memory surely has some."""
        at, capacity = self.running.get(number), self.capacity[number]
        ran_out = at.process.ran_out if at else None
        return capacity if ran_out is None else min(capacity, layers_after(ran_out))

    def jump(self, number: int, seconds: float) -> None:
        """Let the wall clock of a machine jump."""
        self.note(f"the clock of {number} jumps by {seconds:.0f} s")
        self.loop.jump(number, seconds)

    # Requests

    def ask(self, number: int, *, may_cancel: bool = True) -> None:
        """Ask a node for a text."""
        at = self.running.get(number)
        if at is None or at.node is None:
            return
        request = draw_request(self.random, self.models)
        may_cancel = may_cancel and self.random.random() < 0.25
        cancel_at = self.random.randint(0, 4) if may_cancel else None
        asked = Asked(len(self.asked) + 1, number, at.process, request, cancel_at)
        self.asked.append(asked)
        tokens = request.max_tokens
        self.note(f"ask {number}: {request.raw!r}, {tokens} tokens, request {asked.serial}")
        work = self._answer(at.node, asked)
        at.asked.append(self.loop.create_task(work, context=at.process.context.copy()))

    async def _answer(self, node: MeshNode, asked: Asked) -> None:
        await read(node, asked, self.fault)
        self.note(f"request {asked.serial}: {asked.outcome}, {asked.text!r}")
