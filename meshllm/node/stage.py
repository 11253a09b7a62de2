"""A rank behind the entry at work: machine, layers, caches; knows nothing about tokens."""

import asyncio
import logging
from dataclasses import dataclass
from typing import assert_never

from meshllm.errors import MeshError
from meshllm.model.cache import SpanCache
from meshllm.model.runner import Runner
from meshllm.names import SessionId
from meshllm.node.alarm import Alarm
from meshllm.node.peers import Neighbours
from meshllm.node.stopwatch import Stopwatch
from meshllm.node.wire import fault_code, opened, sealed
from meshllm.node.worker import Worker
from meshllm.protocol.blob import SessionKey, session_key
from meshllm.protocol.messages import Blob, Forward, SessionMessage
from meshllm.protocol.stage import Action, Compute, Free, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank holds for a session; touched on the compute thread only."""

    key: SessionKey
    cache: SpanCache


class StageNode:
    """Serves a span of layers to the sessions that come round the ring."""

    def __init__(
        self, machine: Stage, runner: Runner, worker: Worker, neighbours: Neighbours
    ) -> None:
        self._machine = machine
        self._runner = runner
        self._worker = worker
        self._neighbours = neighbours
        self._held: dict[SessionId, _Held] = {}
        self._alarm = Alarm(lambda: machine.deadline, self._expire)
        self._jobs = asyncio.TaskGroup()

    @property
    def sessions(self) -> int:
        """Sessions that hold a cache here."""
        return len(self._held)

    async def run(self) -> MeshError:
        """Serve until a neighbour is gone; return why."""
        try:
            async with self._jobs, self._alarm:
                reason = await self._neighbours.run(self._receive)
        finally:
            self._held.clear()
        logger.info("a stage lost its ring: %s", reason)
        return reason

    def _receive(self, message: SessionMessage) -> None:
        self._machine.round_trip_us = self._neighbours.round_trip_us
        self._act(self._machine.receive(message, self._now()))

    def _expire(self) -> None:
        self._act(self._machine.expire(self._now()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Forward():
                    self._neighbours.forward(action)
                case Compute():
                    self._jobs.create_task(self._serve(action, Stopwatch()))
                case Free(session):
                    self._jobs.create_task(self._worker.run(self._held.pop, session, None))
                case _:
                    assert_never(action)
        self._alarm.reset()

    async def _serve(self, job: Compute, watch: Stopwatch) -> None:
        try:
            blob = await self._worker.run(self._compute, job, watch)
        except Exception as error:  # the supervisor: a bug ends its session, not the others
            self._act(self._machine.failed(job.session, fault_code(error), str(error)))
        else:
            self._act(self._machine.computed(job.session, blob, self._now(), watch.spent))

    def _compute(self, job: Compute, watch: Stopwatch) -> Blob | None:
        watch.queued()
        if job.session not in self._held:
            held = _Held(session_key(job.session), self._runner.new_cache())
            self._held[job.session] = held
        held = self._held[job.session]
        hidden = opened(held.key, job.blob)  # [1, T, D]
        watch.serialised()
        held.cache.crop(job.pos)
        run = self._runner.step if job.is_step else self._runner.prefill
        output = run(hidden, held.cache)  # [1, T, D]
        watch.computed()
        blob = sealed(held.key, output[:, -job.keep :]) if job.keep else None
        watch.serialised()
        return blob

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
