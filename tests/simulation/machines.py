"""Processes of several machines in one event loop: paused and resumed.

A paused process runs no code: callbacks and timers of its tasks wait for it. Every machine has its
own wall clock, which may be wrong and may jump.
"""

import asyncio
from asyncio import Handle, TimerHandle
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from time import time as real_time
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack
from weakref import WeakSet

from meshllm.testing.clock import VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.faulty import End

START_S = 1_800_000_000.0  # wall clock of a machine whose clock is right

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_OWNER: ContextVar["Process | None"] = ContextVar("owner", default=None)


@dataclass(eq=False)
class Process:
    """One run of a program; its tasks run in its context."""

    number: int
    """Of the machine it runs on."""
    is_paused: bool = False
    is_gone: bool = False
    """It was removed from the network."""
    context: Context = field(default_factory=copy_context)
    backlog: list[Handle] = field(default_factory=list)
    """Callbacks to run when it is resumed."""
    ends: set["End"] = field(default_factory=set)
    """Its ends of links."""
    begun: WeakSet[asyncio.Task[object]] = field(default_factory=WeakSet)
    ran_out: int | None = None
    """The fewest layers for which it ran out of memory; None if it never did."""

    def __post_init__(self) -> None:
        self.context.run(_OWNER.set, self)

    @property
    def tasks(self) -> list[asyncio.Task[object]]:
        """Its tasks that have not ended."""
        return [task for task in self.begun if not task.done()]


def process_here() -> Process | None:
    """Return the process whose code is running."""
    return _OWNER.get()


def time_of_day() -> float:
    """Return the wall clock of the machine whose code is running."""
    owner = _OWNER.get()
    if owner is None:
        return real_time()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Machines)
    return START_S + loop.time() + loop.ahead_s[owner.number]


def room_here() -> int | None:
    """Return for how many layers the machine whose code is running has memory; None for any."""
    owner = _OWNER.get()
    if owner is None:
        return None
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Machines)
    return loop.room.get(owner.number)


class Machines(VirtualLoop):
    """An event loop for several processes, each of which can be paused."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s: defaultdict[int, float] = defaultdict(float)
        """Error of the wall clock of each machine."""
        self.most_ahead_s: defaultdict[int, float] = defaultdict(float)
        """Largest error so far of a clock that was ahead."""
        self.room: dict[int, int] = {}
        """Layers for which a machine has memory, where other programs use most of it."""
        self.tasks_begun = 0
        self.set_task_factory(_begin)

    def jump(self, number: int, seconds: float) -> None:
        """Let the wall clock of a machine jump."""
        self.ahead_s[number] += seconds
        self.most_ahead_s[number] = max(self.most_ahead_s[number], self.ahead_s[number])

    def latest_s(self, number: int) -> float:
        """Return a time that the wall clock of a machine has not reached yet."""
        return START_S + self.time() + self.most_ahead_s[number]

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Handle:
        """Run a callback, once its process is not paused."""
        owner = _OWNER.get() if context is None else context.get(_OWNER)
        handle = Handle(callback, args, self, context)
        if owner is None or not owner.is_paused:
            self._ready.append(handle)  # type: ignore[attr-defined]  # as asyncio does
        else:
            owner.backlog.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Handle:
        """Run a callback; there are no other threads, which the loop would have to be woken for."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        """Run a callback at a time, or later when its process is resumed."""
        owner = _OWNER.get() if context is None else context.get(_OWNER)
        if owner is None:
            return super().call_at(when, callback, *args, context=context)

        def ring() -> None:
            if owner.is_paused:
                owner.backlog.append(handle)
            else:
                callback(*args)

        handle = super().call_at(when, ring, context=context)
        return handle

    def resume(self, process: Process) -> None:
        """Resume a process; callbacks that it missed run at once."""
        process.is_paused = False
        for handle in process.backlog:
            self._add_callback(handle)  # type: ignore[attr-defined]  # as asyncio does
        process.backlog.clear()


class _NumberedTask(asyncio.Task[T]):
    """A task whose place in sets, in which a task group cancels, does not depend on addresses."""

    def __init__(
        self,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        loop: Machines,
        context: Context | None,
    ) -> None:
        loop.tasks_begun += 1
        self._number = loop.tasks_begun
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number


def _begin(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T] | Generator[Any, None, T],
    *,
    context: Context | None = None,
) -> asyncio.Task[T]:
    """Create a task and record its process."""
    assert isinstance(loop, Machines)
    task = _NumberedTask(work, loop, context)
    owner = _OWNER.get() if context is None else context.get(_OWNER)
    if owner is not None:
        owner.begun.add(task)
    return task
