"""A stage, a rank after the entry: drives its machine, runs its layers, holds its KV caches."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, assert_never

from torch import Tensor

from meshllm.errors import MeshError, ModelError, PeerFault
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.lm_head import BLOCK
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.names import SessionId, WireMode
from meshllm.node.compute.batcher import Batcher, attempt, map_valid
from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.compute.worker import Worker
from meshllm.node.session.activation_codec import ActivationEncoder, SessionEncoder
from meshllm.node.session.continued_cache import CacheMiss, crop_cache, recompute, undo_step
from meshllm.node.session.ring_link import Neighbours
from meshllm.node.session.wire import fault_code, opened, opened_rows, sealed
from meshllm.node.supervisor import contained
from meshllm.node.timer import DeadlineTimer, loop_time
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.ring.hang import HangLimits
from meshllm.protocol.session.messages import Blob, Delivered, Forward, Logits
from meshllm.protocol.session.stage import Action, Adopt, Compute, Free, Keep, Stage, Withdraw

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StageSession:
    """What this rank holds for a session; used on the compute thread."""

    encoder: SessionEncoder
    cache: SessionCache


class StageNode:
    """Runs a span of layers for the sessions of a ring."""

    def __init__(  # noqa: PLR0913 -- its parts
        self,
        machine: Stage,
        runner: SpanRunner,
        worker: Worker,
        neighbours: Neighbours,
        kept: dict[SessionId, SessionCache],
        wire: WireMode = WireMode.EXACT,
        head: Runner | None = None,
        limits: HangLimits | None = None,
    ) -> None:
        """Serve; ``head`` is this rank's part of the LM head, if it has one.

        ``limits`` are those of its jobs.

        ``kept`` are the caches of the machine's prefix cache.
        """
        self._machine = machine
        self._worker, self._limits = worker, limits or HangLimits()
        self._head = head
        self._runner = runner
        self._neighbours = neighbours
        self._encoder = ActivationEncoder(wire, neighbours)
        self._sessions: dict[SessionId, _StageSession] = {}
        self._kept = kept
        self._changes = deque[Free | Keep | Adopt]()  # of these two, in order
        self._changing = Lock()
        self._jobs = asyncio.TaskGroup()
        self._steps = Batcher(worker, self._step, self._jobs, neighbours.together)
        self._timer = DeadlineTimer(lambda: machine.deadline, self._expire)

    drafting = None
    draft_bytes = 0
    draft_execution = None

    @property
    def budget(self) -> KvBudget:
        """KV budget of running and kept sessions."""
        return self._machine.budget

    @property
    def layers(self) -> SpanRunner:
        """Runs the layers of this rank."""
        return self._runner

    @property
    def waiting_bytes(self) -> int:
        """Memory of the rows that run, wait for that, or wait to be sent."""
        return self._machine.waiting_bytes + self._neighbours.queued_bytes

    @property
    def waiting_room(self) -> int:
        """Bytes that this rank has for these rows."""
        return self._neighbours.most_bytes

    @property
    def runners(self) -> list[Runner]:
        """Runners of the loaded parts of the model."""
        return [*self._runner.pieces, *([self._head] if self._head else [])]

    @property
    def sessions(self) -> int:
        """Number of sessions with a KV cache here."""
        return len(self._sessions)

    @property
    def committed(self) -> dict[SessionId, int]:
        """Positions that no draft takes back, of each session that may be handed over."""
        return self._machine.committed

    def cache_of(self, session: SessionId) -> SessionCache | None:
        """Return the cache of a session; None if it has none yet, or has ended."""
        held = self._sessions.get(session)
        return held.cache if held else None

    def resize(self, totals: Sequence[int]) -> bool:
        """Give caches this many bytes from now on, if the sessions fit; return whether they do."""
        actions = self._machine.resize(totals)
        if actions is None:
            return False
        self._act(actions)
        return True

    def make_room(self, size: int) -> None:
        """Free kept sessions until this many bytes are left for others, or none is kept."""
        self._act(self._machine.make_room(size))

    async def run(self) -> MeshError:
        """Serve until a neighbour is lost; return the reason."""
        try:
            async with self._jobs, self._timer, self._steps:
                reason = await self._neighbours.run(self._receive)
        finally:  # what still runs on the compute thread only writes rows that are cropped later
            ended = self._machine.interrupt(loop_time())
            self._changes += [each for each in ended if isinstance(each, Keep | Free)]
            with self._changing:
                while self._changes:
                    self._change(self._changes.popleft())
                self._sessions.clear()
        logger.info("a stage lost its ring: %s", reason)
        return reason

    def _receive(self, message: Delivered) -> None:
        self._machine.round_trip_us = self._neighbours.round_trip_us
        self._act(self._machine.receive(message, loop_time()))

    def _expire(self) -> None:
        self._act(self._machine.expire(loop_time()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Forward():
                    self._neighbours.forward(action)
                case Compute():
                    self._serve(action, Stopwatch())
                case Withdraw(session):
                    if self._steps.withdraw(session):
                        self._act(self._machine.withdrawn(session))
                case Free() | Keep() | Adopt():
                    self._changes.append(action)
                    self._steps.submit_brief(action.session, self._change_next)
                case _:
                    assert_never(action)
        self._timer.reset()

    def _serve(self, job: Compute, watch: Stopwatch) -> None:
        served = partial(self._served, job, watch)
        if job.is_step and not job.recomputes:
            callbacks = (served, self._logits_done) if self._wants_logits(job) else (served,)
            self._steps.submit(job.session, (job, watch), *callbacks)
        else:
            run = self._recompute if job.recomputes else self._prefill
            self._steps.submit_alone(job.session, partial(self._alone, run, job, watch), served)

    def _served(self, job: Compute, watch: Stopwatch, result: Blob | Exception | None) -> None:
        match result:
            case CacheMiss():
                logger.info("a session is computed again from its first position: %s", result)
                actions = self._machine.missed(job.session)
            case Exception():  # the supervisor: a bug ends its session only
                if isinstance(result, PeerFault):
                    self._neighbours.blame()
                actions = self._machine.failed(job.session, fault_code(result), str(result))
            case blob:
                actions = self._machine.computed(job.session, blob, loop_time(), watch.spent)
        self._act(actions)

    def _wants_logits(self, job: Compute) -> bool:
        return self._head is not None and job.helps is not None

    def _logits_done(self, result: Logits | Exception | None) -> None:
        match result:
            case Exception():  # the entry computes them itself
                logger.warning("no logits for the entry: %s", result)
            case Logits() if (
                not self._neighbours.is_waiting
            ):  # else they would be late, and delay the rows
                self._act(self._machine.helped(result))
            case _:
                pass

    # On the compute thread.

    def _change_next(self) -> None:
        """Apply the next change; when the ring is lost, the event loop applies all at once."""
        with self._changing:
            if self._changes:
                self._change(self._changes.popleft())

    def _change(self, action: Free | Keep | Adopt) -> None:
        match action:
            case Free(session):
                self._sessions.pop(session, None)
                self._kept.pop(session, None)
            case Keep(session):
                if held := self._sessions.pop(session, None):
                    self._kept[session] = held.cache
            case Adopt():
                self._adopt(action)

    def _adopt(self, job: Adopt) -> None:
        """Take over or copy a kept cache; if it is gone, the first rows meet a gap."""
        cache = self._kept.pop(job.base, None) if job.whole else self._kept.get(job.base)
        if cache is not None and not job.whole:
            cache = _copied(cache, job.length)
        if cache is not None:
            self._sessions[job.session] = _StageSession(
                self._encoder.for_session(job.session), cache
            )

    def _alone(
        self, run: Callable[[Compute, Stopwatch], Blob | None], job: Compute, watch: Stopwatch
    ) -> Blob | None:
        with self._worker.expected(self._limits, job.rows, job.pos, is_step=job.is_step):
            return run(job, watch)

    def _prefill(self, job: Compute, watch: Stopwatch) -> Blob | None:
        held, hidden = self._opened(job, watch)
        return self._sealed(job, held, self._runner.prefill(hidden, held.cache), watch)

    def _recompute(self, job: Compute, watch: Stopwatch) -> Blob | None:
        watch.queued()
        held, places = self._session(job.session), range(job.pos, job.pos + job.rows)
        x = self._rows(job, held) if job.blob else None
        watch.serialised()
        steps, sent = job.is_step, job.keep > 0
        rows = recompute(self._runner, x, held.cache, places, is_step=steps, is_sent=sent)
        watch.computed()
        return None if rows is None else held.encoder.seal(rows, 0, is_step=False)

    def _step(self, steps: Sequence[tuple[Compute, Stopwatch]]) -> Iterator[Sequence[Any]]:
        rows, before = sum(job.rows for job, _ in steps), max(job.pos for job, _ in steps)
        with self._worker.expected(self._limits, rows, before, is_step=True):
            yield from self._steps_of(steps)

    def _steps_of(self, steps: Sequence[tuple[Compute, Stopwatch]]) -> Iterator[Sequence[Any]]:
        def run(
            opened: list[tuple[_StageSession, Tensor, int]],
        ) -> list[tuple[_StageSession, Tensor]]:
            caches = [held.cache for held, _, _ in opened]
            outputs = self._runner.step_many([hidden for _, hidden, _ in opened], caches)
            return [(held, output) for (held, *_), output in zip(opened, outputs, strict=True)]

        def open_step(job: Compute, watch: Stopwatch) -> tuple[_StageSession, Tensor, int]:
            return *self._opened(job, watch), job.pos

        def run_again(step: tuple[_StageSession, Tensor, int]) -> None:
            held, hidden, before = step
            self._worker.allow(self._limits.begin(hidden.shape[1], before, is_step=True))
            undo_step(held.cache, before)

        opened = [attempt(open_step, *step) for step in steps]
        ran = map_valid(run, opened, run_again)
        sent = [
            result if isinstance(result, Exception) else attempt(self._sealed, job, *result, watch)
            for result, (job, watch) in zip(ran, steps, strict=True)
        ]
        yield sent
        if any(self._wants_logits(job) for job, _ in steps):
            yield [
                attempt(self._logits, job, rows) for rows, (job, _) in zip(sent, steps, strict=True)
            ]

    def _logits(self, job: Compute, sent: Blob | Exception | None) -> Logits | None:
        """Compute this rank's part of the logits, if requested, while the rows travel."""
        if self._head is None or job.helps is None or not isinstance(sent, Blob):
            return None
        key = self._sessions[job.session].encoder.key
        rows = opened(key, sent)  # [1, T, D], as the entry receives them: they may be rounded
        logits = self._head.step(rows, None)  # [1, T, V']
        blob = sealed(key, logits.view(rows.shape[1], -1, BLOCK))
        return Logits(job.session, self._machine.epoch, job.helps, job.pos, blob)

    def _opened(self, job: Compute, watch: Stopwatch) -> tuple[_StageSession, Tensor]:
        """Return the session and its rows [1, T, D]."""
        watch.queued()
        held = self._session(job.session)
        hidden = self._rows(job, held)
        watch.serialised()
        crop_cache(held.cache, job.pos)
        return held, hidden

    def _rows(self, job: Compute, held: _StageSession) -> Tensor:
        """Return the rows [1, T, D] that the previous rank sent."""
        return opened_rows(held.encoder.key, job.blob, job.rows, self._runner.row_format)

    def _session(self, session: SessionId) -> _StageSession:
        """Return what is held for a session, at first nothing."""
        if session not in self._sessions:
            held = _StageSession(self._encoder.for_session(session), self._runner.new_cache())
            self._sessions[session] = held
        return self._sessions[session]

    def _sealed(
        self, job: Compute, held: _StageSession, output: Tensor, watch: Stopwatch
    ) -> Blob | None:
        watch.computed()
        if not job.keep:
            return None
        rows, took_us = output[:, -job.keep :], watch.compute_us
        if job.keep < job.rows:
            rows = rows.clone()  # a view would hold all of them until it is sent
        blob = held.encoder.seal(rows, took_us, is_step=job.is_step)
        watch.serialised()
        return blob


def _copied(cache: SessionCache, length: int) -> SessionCache | None:
    """Copy the first positions of a cache; None if that fails: its session loses its prefix."""
    with contained("bug: cannot copy a cache"):
        try:
            return cache.branch(length)
        except (ModelError, RuntimeError, MemoryError) as error:  # the last two: out of memory
            logger.info("no cache to continue from: %s", error)
    return None
