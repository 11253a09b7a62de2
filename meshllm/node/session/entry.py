"""The entry, rank 0: embeds tokens, runs its layers, samples, and drives every session."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from random import SystemRandom
from typing import Any

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.model.speculation.draft_model import ModelDrafting
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.execution import Execution
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.names import SessionId, WireMode
from meshllm.node.admission_queue import AdmissionQueue
from meshllm.node.compute.batcher import Batcher
from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.compute.worker import Worker
from meshllm.node.session.activation_codec import ActivationEncoder
from meshllm.node.session.continued_cache import CacheMiss, Start, start_from
from meshllm.node.session.generation import (
    Ended,
    EntryRunners,
    Generation,
    GenerationRequest,
    Output,
    PrefetchedStep,
    Sampled,
)
from meshllm.node.session.resume import ResumeKey, new_key, read_resumable, session_of
from meshllm.node.session.ring_link import Neighbours
from meshllm.node.session.sample_batch import SampleJob, compute_own_logits, sample_batch
from meshllm.node.session.split_head import HeadParts, LogitsRequest
from meshllm.node.session.text_turns import TextTurns
from meshllm.node.session.wire import fault_code
from meshllm.node.timer import DeadlineTimer, loop_time
from meshllm.protocol.drafting.drafter import Drafting, ScopedDrafting
from meshllm.protocol.drafting.known_text import KnownText
from meshllm.protocol.drafting.window import MAX_STEP_ROWS, StepTimes
from meshllm.protocol.kv_cache.admission import QUANTUM, Admission, queue_key_of
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_index import RESUME_S, PrefixHit, last_chunk_rows
from meshllm.protocol.kv_cache.prefix_matching import MIN_SHARED, PrefixCache
from meshllm.protocol.kv_cache.prefix_scope import PrefixScope, is_owners
from meshllm.protocol.ring.hang import HangLimits
from meshllm.protocol.session.actions import (
    Action,
    Closed,
    Done,
    Embed,
    Emit,
    Failed,
    GenerationTask,
    Progress,
    Reserve,
    SampleTokens,
)
from meshllm.protocol.session.codec import MAX_ROWS, size
from meshllm.protocol.session.entry import Entry
from meshllm.protocol.session.messages import (
    Blob,
    Data,
    Delivered,
    Flags,
    Forward,
    Logits,
    RankStats,
)
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.speculation import Speculation, Speculator
from meshllm.protocol.session.stage import MAX_RECOMPUTE_ROWS
from meshllm.protocol.session.waiting import PromptQueue
from meshllm.request import FinishReason, Waiting

PAUSED_S = 5.0  # s without a token, after which an answer that waits for room says so, and again
SHARE = 4  # answers without a limit for which KV caches have room at least

_ROOM = "KV cache memory or a slot, which other sessions use"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EntryConfig:
    """Configuration of the entry of one ring."""

    ring: int
    """Number of ranks."""
    epoch: int
    pace: Callable[[int, int], PrefillPacing]
    """Returns the prefill pace for this many new prompt tokens and this many other sessions."""
    max_sessions: int
    """Concurrent generations; further ones wait."""
    max_crop: int | None
    """Maximum tokens by which a KV cache of this model can be cropped; None is unlimited."""
    prefixes: PrefixCache[SessionCache]
    """Prefix cache, and the budget for KV caches on every rank, this one first."""
    drafting: Drafting | None = None
    """Drafter for speculative decoding, if caches can be cropped; None disables it."""
    wire: WireMode = WireMode.EXACT
    """Encoding of the hidden states sent to the next rank."""
    draft: Drafting | None = None
    """Draft model, used in addition to ``drafting``."""
    prompt_bytes: int | None = None
    """For rows of prompts in flight, of all sessions; None if they wait on no other rank."""
    max_chunk: int = MAX_ROWS
    """Maximum rows of a chunk."""
    limits: HangLimits = field(default_factory=HangLimits)
    """Of the jobs of this rank."""
    is_handed_over: bool = False
    """Whether the ring before this one was prepared to end, so that caches may be handed over."""
    on_recomputed: Callable[[int], None] | None = None
    """Called with the number of rows of an earlier ring that all layers have computed again."""


class EntryNode:
    """Runs generations; the stages, if any, hold the other layers."""

    def __init__(
        self,
        runners: EntryRunners,
        config: EntryConfig,
        worker: Worker,
        neighbours: Neighbours | None,
    ) -> None:
        self._runners = runners
        self._config = config
        self._neighbours = neighbours
        self.pace = config.pace
        """Called once per generation."""
        self._speculation: Speculation | None = None
        if config.drafting:
            times = StepTimes(together=runners.front.is_row_invariant, ring=config.ring)
            self._speculation = Speculation(config.drafting, times, draft=config.draft)
        self._jobs = asyncio.TaskGroup()
        self._head: HeadParts | None = None
        if runners.head and runners.helped:
            self._head = HeadParts(runners.helped, runners.head, SystemRandom().random)
        self._worker = worker
        together = neighbours.together if neighbours else nullcontext
        self._samples = Batcher(worker, self._sample_batch, self._jobs, together)
        self._encoder = ActivationEncoder(config.wire, neighbours)
        self._prefixes = config.prefixes
        self._queue = AdmissionQueue(Admission(self.budget, config.max_sessions))
        self.text_turns = TextTurns()
        """Of the askers, with threads that read their prompts before anything is computed."""
        self._prompts = PromptQueue()
        if config.prompt_bytes is not None:
            form = runners.front.row_format
            self._prompts = PromptQueue(config.prompt_bytes // (form.width * form.dtype.itemsize))
        self._sessions: dict[SessionId, Generation] = {}
        self._lost: MeshError | None = None
        self._since = loop_time()
        self._timer = DeadlineTimer(self._deadline, self._expire)

    @property
    def budget(self) -> KvBudget:
        """KV budget of running and kept sessions, on every rank."""
        return self._prefixes.index.budget

    @property
    def drafting(self) -> Drafting | None:
        """Drafter for speculative decoding."""
        return self._config.drafting

    @property
    def draft_bytes(self) -> int:
        """Memory of the draft model, if there is one."""
        draft = self._config.draft
        return draft.bytes if isinstance(draft, ModelDrafting) else 0

    @property
    def draft_execution(self) -> Execution | None:
        """How the draft model is run, if there is one."""
        draft = self._config.draft
        return draft.execution if isinstance(draft, ModelDrafting) else None

    @property
    def layers(self) -> SpanRunner:
        """Runs the layers of this rank."""
        return self._runners.front

    @property
    def waiting_bytes(self) -> int:
        """Memory of the rows that wait to be sent."""
        return self._neighbours.queued_bytes if self._neighbours else 0

    @property
    def waiting_room(self) -> int:
        """Bytes that this rank has for these rows."""
        return self._neighbours.most_bytes if self._neighbours else 0

    @property
    def runners(self) -> list[Runner]:
        """Runners of the loaded parts of the model."""
        return self._runners.runners

    @property
    def context(self) -> int:
        """Maximum tokens of a session, prompt included."""
        return self._runners.context

    @property
    def vocabulary(self) -> int:
        """Tokens of the model."""
        return self._runners.front.vocabulary

    @property
    def is_lost(self) -> bool:
        """Whether the ring was lost, so that no generation can start."""
        return self._lost is not None

    @property
    def sessions(self) -> int:
        """Number of generations in progress."""
        return len(self._sessions)

    @property
    def committed(self) -> dict[SessionId, int]:
        """Positions that no draft takes back, of each session that may be handed over."""
        sessions = self._sessions.items()
        return {key: each.machine.committed for key, each in sessions if each.hands_over}

    def cache_of(self, session: SessionId) -> SessionCache | None:
        """Return the cache of a session; None if it has none yet, or has ended."""
        generation = self._sessions.get(session)
        return generation.cache if generation else None

    def resize(self, totals: Sequence[int]) -> bool:
        """Give caches this many bytes on each rank from now on.

        Return whether all generations that run and wait fit; if not, nothing changes.
        """
        if not self._queue.resize(totals):
            return False
        self._prefixes.fit()
        return True

    async def run(self) -> MeshError:
        """Serve until a neighbour is lost, and return why; in a ring of one, until cancelled."""
        try:
            async with self._jobs, self._timer, self._samples:
                if self._neighbours is None:
                    await asyncio.Event().wait()  # never set
                    raise AssertionError
                self._lost = await self._neighbours.run(self._receive)
                logger.info("the entry lost its ring: %s", self._lost)
                return self._lost
        finally:
            self._end(self._lost or LinkLost("the ring was closed"))

    async def generate(self, order: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Wait for admission, then yield the outputs of an order, `Ended` last.

        Raises:
            UserError: the prompt exceeds the context, or prompt and answer exceed the KV budget.
            Busy: the admission queue is full.
            MeshError: the generation failed; no rank holds any of its state.

        Closing the iterator cancels the generation on every rank.
        """
        begin = loop_time() if order.begin is None else order.begin
        key = new_key()
        session = session_of(key)
        task = self._task(session, order)
        requester, name = queue_key_of(order.prefix_scope)
        answer = task.limit - len(task.prompt)
        async with self._queue.admitted(session, task.limit, requester, name, answer=answer):
            generation = self._open(task, order, key, begin)
            try:
                while not generation.closed.is_set() or not generation.outputs.empty():
                    output = await _next_output(generation)
                    if isinstance(output, MeshError):
                        raise output
                    yield output
            finally:
                self._act(session, generation.machine.finish(FinishReason.CANCELLED, loop_time()))
                await generation.closed.wait()

    def _task(self, session: SessionId, order: GenerationRequest) -> GenerationTask:
        is_row_invariant = self._runners.front.is_row_invariant
        return GenerationTask(
            session=session,
            epoch=self._config.epoch,
            ring=self._config.ring,
            prompt=order.known,
            max_tokens=self._max_tokens(order),
            given=len(order.given) if is_row_invariant else 0,
            context=self._runners.context,
            max_crop=self._config.max_crop,
            recompute_rows=MAX_RECOMPUTE_ROWS if is_row_invariant else MAX_STEP_ROWS,
            keep_from=MIN_SHARED if self._uses_prefixes(order) else None,
            resumes=self._prefixes.index.resumes and order.on_rows is None,
            is_own=is_owners(order.prefix_scope),
            hands_over=order.hands_over,
        )

    def _max_tokens(self, order: GenerationRequest) -> int:
        """Return how many tokens may follow what is known.

        More than there is room for on an empty ring counts as no limit: that is a share of it.
        """
        given, most = len(order.given), order.max_tokens
        if most is not None:
            longest = min(len(order.prompt) + most, self._runners.context)
            if order.forced or self.budget.holds(longest):
                return most - given
        room = self.budget.tokens
        most = len(order.forced) + max(QUANTUM, room // SHARE)
        most = most if order.bound is None else min(most, order.bound)
        return max(1, min(most - given, room - len(order.known)))

    def _open(
        self, task: GenerationTask, order: GenerationRequest, key: ResumeKey, begin: float
    ) -> Generation:
        if self._lost:
            raise self._lost
        session, now = task.session, loop_time()
        start = self._start(session, order, now)
        self._prefixes.fit()
        if start.base and start.base.is_claimed:
            task = replace(task, keep_from=None)  # no other prompt may continue from it
        room = min(task.limit, len(task.prompt) + QUANTUM)
        machine = Entry(task, self._pace(order, start.chunk), self._prompts, room)
        speculator = None
        if self._speculation:
            shared = self._speculation
            shared = _within(shared, order.prefix_scope)
            if order.forced:  # every draft is right
                shared = Speculation(KnownText(order.prompt + order.forced), shared.times)
            speculator = Speculator(shared, order.known)
        encoder = self._encoder.for_session(session)
        generation = Generation(
            order, machine, self._runners, encoder, begin, speculator, start, key
        )
        self._sessions[session] = generation
        if start.base and start.cache is None:
            self._samples.submit_brief(session, generation.copy_base)
        self._act(session, machine.open(now, start.base))
        return generation

    def _start(self, session: SessionId, order: GenerationRequest, now: float) -> Start:
        """Continue from what the last ring left of an order, or from another text."""
        if resumed := self._resumed(session, order, now):
            hit, cache = resumed
            chunk = last_chunk_rows(hit.chunks)  # the bits depend on it
            return Start(self._asking(hit, cache), cache, self._runners.front.new_cache, chunk)
        found = None
        if self._uses_prefixes(order):
            shared, scope = order.shares_prefix, order.prefix_scope
            matched = self._prefixes.find(order.known, now, is_shared=shared, scope=scope)
            found = self._within_budget(session, matched)
        if found:
            found = self._asking(*found), found[1]
        return start_from(found, self._runners.front.new_cache)

    def _resumed(
        self, session: SessionId, order: GenerationRequest, now: float
    ) -> tuple[PrefixHit, SessionCache | None] | None:
        """Return what the last ring left of an order, here or on the other ranks."""
        if order.resume is None:
            return None
        known = order.known
        before, chunks, held = read_resumable(order.resume, len(known), self._config.max_chunk)
        resumed = self._prefixes.resume(before, known[:held], chunks, now)
        if found := self._within_budget(session, resumed):
            return found
        if self._config.ring == 1 or now >= self._since + RESUME_S:
            return None
        return self._prefixes.resume_empty(before, held, chunks, self._runners.front.span)

    def _within_budget(
        self, session: SessionId, found: tuple[PrefixHit, SessionCache] | None
    ) -> tuple[PrefixHit, SessionCache] | None:
        """Return what was found, unless it is a cache to take over whose room does not fit.

        It may have room for more than the session needs.
        """
        if found and found[0].whole and not self.budget.reserve(session, found[0].capacity):
            return None
        return found

    def _asking(self, hit: PrefixHit, cache: SessionCache | None) -> PrefixHit:
        """Ask how much of the lost layers was handed over, if any of it may have been."""
        if not (hit.lost and cache and self._config.is_handed_over):
            return hit
        return replace(hit, held=min(hit.length, cache.length))

    def _pace(self, order: GenerationRequest, chunk: int | None) -> PrefillPacing:
        """Pace a whole prompt, as another rank may have evicted the prefix that is found here."""
        pace = self.pace(max(1, len(order.known)), self.sessions)
        return replace(pace, chunk=chunk) if chunk else pace

    def _uses_prefixes(self, order: GenerationRequest) -> bool:
        """Whether an order uses the prefix cache; an embedding would evict what chats continue."""
        return self._prefixes.index.keeps and order.on_rows is None

    def _receive(self, message: Delivered) -> None:
        generation = self._sessions.get(message.session)
        if generation is None:
            return
        if isinstance(message, Logits):
            if message.epoch == self._config.epoch and generation.logits_request:
                generation.logits_request.receive(message)
            return
        if isinstance(message, Data):
            generation.gauge.returned(loop_time(), message.pos + message.rows)
        self._act(message.session, generation.machine.receive(message, loop_time()))

    def _act(self, session: SessionId, actions: list[Action]) -> None:
        generation = self._sessions.get(session)
        if generation is None:
            return
        for place, action in enumerate(actions, start=1):
            # A prefetched job reports its result within this call: it must be the last action.
            assert place == len(actions) or not isinstance(action, Embed | SampleTokens)
            match action:
                case Embed():
                    self._embed(session, generation, action)
                case SampleTokens():
                    self._sample_tokens(session, generation, action)
                case Forward():
                    self._forward(generation, action)
                case Closed(tallies):
                    self._close(session, tallies)
                    self._timer.fire_by(self._prefixes.index.deadline)
                case _:
                    self._note(session, generation, action)
        if self._prompts.waiting:
            self._take_turns()
        self._timer.fire_by(generation.machine.deadline)

    def _reserve(self, session: SessionId, generation: Generation, positions: int) -> None:
        """Get room for this many positions; the generation goes on as far as it has room."""

        def grown() -> None:
            generation.is_paused = False
            self._prefixes.fit()
            self._act(session, generation.machine.grown())

        generation.is_paused = True
        self._queue.grow(session, positions, grown)

    def _take_turns(self) -> None:
        """Let the sessions go on for whose prompts there is room now."""
        while turn := self._prompts.next():
            self._act(turn, self._sessions[turn].machine.proceed())

    def _note(
        self,
        session: SessionId,
        generation: Generation,
        action: Emit | Reserve | Progress | Done | Failed,
    ) -> None:
        if isinstance(action, Reserve):
            self._reserve(session, generation, action.positions)
            return
        if isinstance(action, Done | Failed):
            generation.step_rows = 0
        if isinstance(action, Failed) and action.is_seen and self._is_of_other(generation):
            assert self._neighbours is not None  # there is another rank
            self._neighbours.blame()
        generation.note(action)

    def _is_of_other(self, generation: Generation) -> bool:
        """Whether what breaks the rules is the fault of the other of two ranks, not counted yet.

        Of more ranks, any may have changed the positions that a message names.
        """
        return self._config.ring == 2 and generation.cause is None

    def _forward(self, generation: Generation, action: Forward) -> None:
        assert self._neighbours is not None  # a ring of one forwards nothing
        message = action.message
        if isinstance(message, Data) and message.is_decoded:
            generation.gauge.left(loop_time(), message.pos + message.rows, size(message))
            is_lone = message.rows == 1 and self.sessions == 1 and not generation.embeds
            if is_lone and self._neighbours.helps and self._head and self._head.control.asks():
                generation.logits_request = LogitsRequest(message.gen, message.pos)
                action = Forward(replace(message, flags=message.flags | Flags.HELP))
        self._neighbours.forward(action)

    def _close(self, session: SessionId, tallies: tuple[RankStats, ...]) -> None:
        generation = self._sessions.pop(session)
        generation.take_ahead(None)
        self._keep(session, generation)
        match generation.outcome:
            case MeshError() as error:
                generation.outputs.put_nowait(error)
            case reason:
                round_trip_us = self._neighbours.round_trip_us if self._neighbours else 0
                reused = generation.machine.reused
                measured = generation.gauge.measured(tallies, round_trip_us, reused)
                generation.outputs.put_nowait(Ended(reason, measured))
        generation.closed.set()
        if self._lost is None:  # else nothing can go on
            self._queue.end_of(session)

    def _keep(self, session: SessionId, generation: Generation) -> None:
        """Cache the prefix that every rank keeps; forget the base if a rank had lost it."""
        machine, base, cache = generation.machine, generation.base, generation.cache
        if base and machine.reused < base.length:
            self._prefixes.forget(base.session)
        if machine.kept and cache is not None:
            prompt = generation.prompt_tokens
            self.budget.release(session)  # counted as kept from now on
            self._prefixes.keep(
                session,
                machine.kept,
                prompt,
                cache,
                machine.capacity,
                loop_time(),
                chunks=machine.kept_chunks,
                lost=machine.lost,
                is_lost=generation.outcome is self._lost,
                is_claimed=base is not None and base.is_claimed,
                scope=generation.scope,
                base=(base.session, base.length) if base and base.whole else None,
            )

    def _sample_tokens(self, session: SessionId, generation: Generation, job: SampleTokens) -> None:
        """Sample, and start the next step without waiting until the tokens are delivered."""
        # Several steps in flight keep other ranks busy; several sessions do that by themselves.
        is_lone = self._neighbours is not None and self.sessions == 1
        beside = self._steps_beside(generation)
        generation.sessions = 1 + len(beside)
        generation.rows_beside = min(generation.rows_beside, sum(beside))
        generation.depth = self._speculation.depth if self._speculation and is_lone else 1
        generation.take_ahead(None)
        sample = SampleJob(generation, job, Stopwatch(), Stopwatch())
        if generation.embeds:
            deliver = partial(generation.deliver, job, sample.watch)
            sampled = partial(self._sampled, session, generation, sample)
            self._samples.submit_alone(session, deliver, sampled)
            return
        ahead = generation.ahead = PrefetchedStep(sample.watch_ahead)
        sampled = partial(self._sampled, session, generation, sample)
        submit = partial(self._samples.submit, session, sample, sampled, ahead.set_result)
        if self._head is None:
            submit()
            return
        head, split = self._head, self._head.begin(generation.logits_request_for(job))
        sample.split = split
        if split.request is None:
            submit()
        else:
            self._samples.submit_alone(
                session,
                partial(compute_own_logits, head, sample),
                lambda error: sampled(error) if error else head.wait(split, submit),
            )

    def _steps_beside(self, generation: Generation) -> list[int]:
        """Return the rows of the steps of other generations that are in the ring."""
        others = (each for each in self._sessions.values() if each is not generation)
        return [each.step_rows for each in others if each.step_rows]

    def _sample_batch(self, samples: Sequence[SampleJob]) -> Iterator[Sequence[Any]]:
        """Sample, and run the steps that follow; runs on the compute thread."""
        rows = sum(1 + len(sample.job.drafts) for sample in samples)
        before = max(sample.job.pos for sample in samples)
        limits = self._config.limits

        def again(rows: int, before: int) -> None:
            self._worker.allow(limits.begin(rows, before, is_step=True))

        with self._worker.expected(limits, rows, before, is_step=True):
            yield from sample_batch(self._runners, self._head, samples, again)

    def _prefill(self, generation: Generation, job: Embed, watch: Stopwatch) -> Blob | None:
        """Run tokens; runs on the compute thread."""
        rows, limits = len(job.tokens), self._config.limits
        with self._worker.expected(limits, rows, job.pos, is_step=job.is_step):
            return generation.embed(job, watch)

    def _embed(self, session: SessionId, generation: Generation, job: Embed) -> None:
        """Run tokens, unless the job was prefetched."""
        is_new = job.is_step and not job.recomputes and job.pos >= generation.known_tokens
        generation.step_rows = len(job.tokens) if is_new else 0
        ahead = generation.take_ahead(job)
        watch = ahead.watch if ahead else Stopwatch()
        embedded = partial(self._embedded, session, generation, job, watch)
        if ahead:
            ahead.ask(embedded)
        else:
            work = partial(self._prefill, generation, job, watch)
            left = max(0, generation.known_tokens - job.pos)
            self._samples.submit_alone(session, work, embedded, left=left)

    def _embedded(
        self,
        session: SessionId,
        generation: Generation,
        job: Embed,
        watch: Stopwatch,
        result: Blob | Exception | None,
    ) -> None:
        if session not in self._sessions:
            return
        match result:
            case CacheMiss():
                generation.step_rows = 0
                logger.info("prefix lost, restarting from the first token: %s", result)
                self._act(session, generation.machine.missed(loop_time()))
            case Exception():  # the supervisor: a bug ends its session only
                self._fail(session, generation, result)
            case blob:
                if (rows := generation.recomputed_rows(job)) and self._config.on_recomputed:
                    self._config.on_recomputed(rows)
                if job.pos >= generation.known_tokens:
                    generation.gauge.computed(watch.spent)
                generation.rows_beside = sum(self._steps_beside(generation))
                self._act(session, generation.machine.computed(blob, loop_time()))

    def _sampled(
        self,
        session: SessionId,
        generation: Generation,
        sample: SampleJob,
        result: Sampled | Exception,
    ) -> None:
        if sample.split and self._head:
            self._head.learn(sample.split)
        if session not in self._sessions:
            return
        generation.step_rows = 0
        if isinstance(result, Exception):  # as above
            self._fail(session, generation, result)
            return
        if sample.job.pos > generation.known_tokens:
            generation.gauge.computed(sample.watch.spent)
        generation.gauge.tokens(loop_time(), len(result.tokens))
        actions = generation.machine.sampled(
            result.tokens, loop_time(), result.steps, stop=result.is_last
        )
        self._act(session, actions)

    def _fail(self, session: SessionId, generation: Generation, error: Exception) -> None:
        if isinstance(error, PeerFault) and self._neighbours:
            self._neighbours.blame()
        generation.cause = error if isinstance(error, MeshError) else None
        self._act(session, generation.machine.failed(fault_code(error), str(error), loop_time()))

    def _end(self, reason: MeshError) -> None:
        """Interrupt the generations in progress; their Close cannot come back."""
        self._lost = reason
        self._queue.end(reason)
        for session, generation in list(self._sessions.items()):
            if generation.machine.interrupt():
                generation.outcome = reason
            self._close(session, ())

    def _deadline(self) -> float | None:
        deadlines = [generation.machine.deadline for generation in self._sessions.values()]
        deadlines.append(self._prefixes.index.deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _expire(self) -> None:
        self._prefixes.expire(loop_time())
        for session, generation in list(self._sessions.items()):
            self._act(session, generation.machine.expire(loop_time()))


async def _next_output(generation: Generation) -> Output | MeshError:
    """Return the next output; while the generation waits for room, one that says so."""
    while generation.is_paused:
        try:
            async with asyncio.timeout(PAUSED_S):
                return await generation.outputs.get()
        except TimeoutError:
            if generation.is_paused:
                return Waiting(_ROOM)
    return await generation.outputs.get()


def _within(shared: Speculation, scope: PrefixScope) -> Speculation:
    """Draft from the texts of a scope only."""

    def scoped(drafting: Drafting) -> Drafting:
        if isinstance(drafting, SuffixDrafting | ModelDrafting):
            return ScopedDrafting(drafting, scope)
        return drafting

    draft = scoped(shared.draft) if shared.draft else None
    return replace(shared, drafting=scoped(shared.drafting), draft=draft)
