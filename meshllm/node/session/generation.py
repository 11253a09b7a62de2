"""State of one generation on the entry: KV cache, token ids, outputs."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, assert_never

import torch
from torch import Tensor

from meshllm.errors import MeshError, ModelError
from meshllm.model.sampling import sample_token
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.model.text.grammar import Constraint
from meshllm.names import NodeId
from meshllm.node.compute.gauge import GenerationTimer, GenerationTimes
from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.session.activation_codec import SessionEncoder
from meshllm.node.session.continued_cache import CacheMiss, Start, crop_cache, recompute
from meshllm.node.session.resume import ResumeKey, resumable
from meshllm.node.session.split_head import LogitsRequest
from meshllm.node.session.wire import error_of, opened_rows
from meshllm.node.supervisor import contained
from meshllm.protocol.kv_cache.prefix_index import Chunk
from meshllm.protocol.kv_cache.prefix_scope import PrefixScope
from meshllm.protocol.session.actions import Done, Embed, Emit, Failed, Progress, SampleTokens
from meshllm.protocol.session.blob import SessionKey
from meshllm.protocol.session.entry import Entry
from meshllm.protocol.session.messages import Blob
from meshllm.protocol.session.speculation import Speculator, Steps
from meshllm.request import FinishReason, Prefilled, Resumable, Sampling, Waiting

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of the answer."""

    id: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The generation ended on every rank."""

    reason: FinishReason
    measured: GenerationTimes


Output = Waiting | Prefilled | Resumable | Token | Ended


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request in token ids."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None
    """Maximum tokens of the answer; None is a share of those for which KV caches have room."""
    bound: int | None = field(default=None, kw_only=True)
    """Maximum tokens of an answer without ``max_tokens``, what is left of a quota."""
    given: tuple[int, ...] = field(default=(), kw_only=True)
    """Tokens of the answer that an earlier ring sampled; they are prefilled with the prompt."""
    resume: Resumable | None = field(default=None, kw_only=True)
    """The latest one of that ring."""
    take_token: Callable[[int], bool]
    """Takes the next token, once each and in order, on the compute thread; returns whether it ends
    the answer."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), kw_only=True)
    forced: tuple[int, ...] = field(default=(), kw_only=True)
    """The first tokens of the answer, whatever sampling gives; they are part of the prompt for
    penalties."""
    grammar: Constraint | None = field(default=None, kw_only=True)
    """What the answer may continue with after the given tokens."""
    on_logits: Callable[[Tensor, int], None] | None = field(default=None, kw_only=True)
    """Called before ``take_token``, with the logits [V] from which the token was sampled."""
    on_rows: Callable[[Tensor], None] | None = field(default=None, kw_only=True)
    """Takes the rows [T, D] after the final norm, in order and once each, from that of the last
    token of the prompt on; nothing is sampled then."""
    requester: NodeId | None = field(default=None, kw_only=True)
    """The node that sent the request; None is this one."""
    begin: float | None = field(default=None, kw_only=True)
    """Loop time from which the time to its first token counts; None is when the entry gets it."""
    scope: str = field(default="", kw_only=True)
    """Of the asker, see `Request`; with it, whose turn in the queue the request takes."""
    shares_prefix: bool = field(default=False, kw_only=True)
    """Other requests continue the same text: its cache is copied, not taken over."""
    hands_over: bool = field(default=True, kw_only=True)
    """Its caches may be handed over to other nodes; they may not if only some nodes may see it."""

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens to prefill."""
        return self.prompt + self.given

    @property
    def prefix_scope(self) -> PrefixScope:
        """Whose texts it may continue."""
        return self.requester, self.scope


@dataclass(frozen=True, slots=True)
class EntryRunners:
    """Runners of the entry."""

    front: SpanRunner
    """The embedding and the first layers; in a ring of one, the whole model."""
    head: Runner | None
    """The LM head, or its second part if it is split; None if ``front`` has it, which is possible
    in a ring of one."""
    context: int
    """Maximum tokens of a session, prompt included."""
    helped: Runner | None = None
    """The first part of a split LM head, which the last rank may compute instead."""

    @property
    def runners(self) -> list[Runner]:
        """All loaded runners."""
        return [*self.front.pieces, *(each for each in (self.helped, self.head) if each)]

    @property
    def prepared(self) -> int:
        """Warm-up steps so far, of all runners."""
        return sum(each.prepared for each in self.runners)

    def logits(self, rows: list[Tensor]) -> Sequence[Tensor]:
        """Compute logits [1, T, V] of rows [1, T, D]; if ``front`` has the head, return them."""
        if self.head is None:
            return rows
        nothing = [None] * len(rows)
        logits = self.head.step_many(rows, nothing)
        if self.helped is None:
            return logits
        before = self.helped.step_many(rows, nothing)
        return [torch.cat(parts, -1) for parts in zip(before, logits, strict=True)]

    def final_rows(self, rows: Tensor) -> Tensor:
        """Apply the final norm to rows [1, T, D], unless ``front`` has done it."""
        return rows if self.head is None else self.head.final_rows(rows, None)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens, and the drafts that follow them and the steps in flight."""

    tokens: tuple[int, ...]
    is_last: bool
    """Whether the last of them ends the answer."""
    steps: Steps


@dataclass(slots=True)
class PrefetchedStep:
    """A prefetched Embed; its result waits for the job that requests it, or the job for it."""

    watch: Stopwatch
    _callback: Callable[[Any], None] | None = None
    _results: list[Any] = field(default_factory=list)

    def set_result(self, result: Blob | Exception | None) -> None:
        """Take the result."""
        self._results.append(result)
        self._deliver()

    def ask(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with the result, at once if it is known."""
        self._callback = callback
        self._deliver()

    def _deliver(self) -> None:
        if self._callback and self._results:
            self._callback(self._results.pop())


class Generation:
    """State of one generation request."""

    def __init__(  # noqa: PLR0913 -- its parts are made elsewhere
        self,
        order: GenerationRequest,
        machine: Entry,
        runners: EntryRunners,
        encoder: SessionEncoder,
        begin: float,
        speculator: Speculator | None,
        start: Start,
        key: ResumeKey,
    ) -> None:
        """Prepare a generation that continues from ``start``; who has ``key`` may resume it."""
        self.machine = machine
        self.gauge = GenerationTimer(begin)
        self.outputs: asyncio.Queue[Output | MeshError] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.outcome: FinishReason | MeshError = FinishReason.CANCELLED
        self.cause: MeshError | None = None  # of a failure on this rank
        self.ahead: PrefetchedStep | None = None
        self.depth = 1
        """Maximum steps in flight, from the next `SampleTokens` on."""
        self.sessions = 1
        """Generations with a step in the ring at the next `SampleTokens`, this one included."""
        self.step_rows = 0
        """Rows of the step in the ring that has draft tokens or a new one; 0 if there is none."""
        self.rows_beside = 0
        """Rows of other such steps in the ring when it was sent or when it came back: the fewer."""
        self.is_paused = False
        """Whether it waits for room for more tokens."""
        self.logits_request: LogitsRequest | None = None
        """Logits requested from the last rank with the last step."""
        self.scope = order.prefix_scope
        self.hands_over = order.hands_over
        self._order = order
        self._runners = runners
        self._encoder = encoder
        self._speculator = speculator
        self._clock = asyncio.get_running_loop().time  # for the compute thread
        self._resume_key = key
        self.base = base = start.base
        lost = base.lost if base else ()
        self._feeds_lost = any(runners.front.span.stop in span for span in lost)
        self.cache = start.cache
        """KV cache of the local layers; one that is not taken over is made by the first job."""
        self._make_cache = start.make
        self._history = list(order.known)
        self._is_alone = machine.is_alone
        self._rows: Tensor | None = None  # the last local outputs, for sampling without a blob
        self._next: Embed | None = None  # after the last sampling, unless another job comes first

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self._order.prompt)

    @property
    def embeds(self) -> bool:
        """Whether the rows after the final norm are wanted, not tokens."""
        return self._order.on_rows is not None

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt, and of the answer that were given."""
        return len(self._order.known)

    def recomputed_rows(self, job: Embed) -> int:
        """Return how many rows of a job were computed before the loss of an earlier ring."""
        order, end = self._order, job.pos + len(job.tokens)
        if job.recomputes or not (order.given or order.resume):
            return 0
        held = order.resume.held if order.resume else None
        known = self.known_tokens - 1  # the last one was sampled only
        return max(0, min(end, known if held is None else min(held, known)) - job.pos)

    def resumable(self, chunks: Sequence[Chunk], held: int | None = None) -> Resumable:
        """Return what an ingress needs to resume it, see `Resumable`."""
        before = self._order.resume
        cached = before.cached if before else min(self.machine.reused, self.prompt_tokens)
        return resumable(self._resume_key, chunks, held, cached)

    def logits_request_for(self, job: SampleTokens) -> LogitsRequest | None:
        """Return the logits request that belongs to this job, if any."""
        request = self.logits_request
        return request if request and (request.gen, request.pos + 1) == (job.gen, job.pos) else None

    def take_ahead(self, job: Embed | None) -> PrefetchedStep | None:
        """Return the prefetched step if it is this job; discard it otherwise."""
        ahead, self.ahead = self.ahead, None
        if job and self._next and (job.pos, job.tokens) == (self._next.pos, self._next.tokens):
            return ahead
        return None

    def note(self, action: Emit | Progress | Done | Failed) -> None:
        """Queue an output, or record the outcome, that the machine reports."""
        match action:
            case Emit(token):
                if chunks := self.machine.take_chunks():
                    self.outputs.put_nowait(self.resumable(chunks))
                self.outputs.put_nowait(Token(token))
            case Progress(done, total):
                if done < total and not self._is_alone:  # else tokens follow, or nobody would do it
                    self.outputs.put_nowait(self.resumable(*self.machine.held))
                self.outputs.put_nowait(Prefilled(done, total))
            case Done(reason):
                self.outcome = reason
            case Failed(code, text, rank):
                self.outcome = self.cause or error_of(code, text, rank)
            case _:
                assert_never(action)

    # On the compute thread.

    def copy_base(self) -> None:
        """Copy the cache that it shares, before another generation takes that over."""
        if self.closed.is_set():
            return
        # The first job meets a bug again, which ends one session; without a copy it starts again.
        with contained("bug: the prefix of a prompt is not copied"), suppress(CacheMiss):
            self._opened_cache()

    def embed(self, job: Embed, watch: Stopwatch) -> Blob | None:
        """Run tokens through the embedding and the local layers.

        Nothing is computed for a generation that has ended: another one may have its cache.
        """
        watch.queued()
        if self.closed.is_set():
            return None
        tokens = torch.tensor([job.tokens])  # [1, T]
        if job.recomputes:
            return self._recompute(job, tokens, watch)
        cache = self._cropped(job.pos)
        if self.embeds and self._runners.head is None:
            output = self._runners.front.final_rows(tokens, cache)
        elif job.is_step:
            output = self._runners.front.step(tokens, cache)  # [1, T, D or V]
        else:
            rows = 1 if self._is_alone else None  # of logits
            output = self._runners.front.prefill(tokens, cache, rows)
        return self.embedded(job, output, watch)

    def embedded(self, job: Embed, output: Tensor, watch: Stopwatch) -> Blob | None:
        """Seal the output [1, T, D] of an Embed; in a ring of one, keep the rows to sample from."""
        watch.computed()
        if self._is_alone:
            self._rows = output[:, -1 - job.drafts :]
            return None
        blob = self._encoder.seal(output, watch.compute_us, is_step=job.is_step)
        watch.serialised()
        return blob

    def _recompute(self, job: Embed, tokens: Tensor, watch: Stopwatch) -> Blob | None:
        """Compute rows only in the layers that lack them; return them if the next rank does."""
        places = range(job.pos, job.pos + len(job.tokens))
        front, cache, sent = self._runners.front, self._opened_cache(), self._feeds_lost
        rows = recompute(front, tokens, cache, places, is_step=job.is_step, is_sent=sent)
        watch.computed()
        return None if rows is None else self._encoder.seal(rows, 0, is_step=False)

    @property
    def key(self) -> SessionKey:
        """Key that seals its blobs."""
        return self._encoder.key

    def open(self, job: SampleTokens, watch: Stopwatch) -> Tensor:
        """Return the rows [1, 1 + G, D] for the head; in a ring of one they are logits."""
        watch.queued()
        self._next = None
        rows = self._rows if job.blob is None else self._opened(job)
        if rows is None:
            raise ModelError(f"No hidden state to sample the token at position {job.pos} from")
        watch.serialised()
        return rows

    def _opened(self, job: SampleTokens) -> Tensor:
        form = self._runners.front.row_format
        return opened_rows(self._encoder.key, job.blob, 1 + len(job.drafts), form)

    def sample(self, job: SampleTokens, logits: Tensor, watch: Stopwatch) -> Sampled:
        """Sample from ``logits`` [1, 1 + G, V] up to the first rejected draft token."""
        tokens, is_last = self._sample_and_verify(logits[0], job)
        steps = self._look_ahead(tokens, job, is_last=is_last)
        watch.computed()
        return Sampled(tokens, is_last, steps)

    def deliver(self, job: SampleTokens, watch: Stopwatch) -> Sampled:
        """Deliver rows after the final norm; the tokens are those that are forced."""
        rows = self._runners.final_rows(self.open(job, watch))[0]
        assert self._order.on_rows
        self._order.on_rows(rows)
        forced = [self._forced_at(job.pos + place) for place in range(len(rows))]
        tokens = tuple(token or 0 for token in forced)  # none is forced after the last row
        self._history += tokens
        is_last = None in forced
        steps = self._look_ahead(tokens, job, is_last=is_last)
        watch.computed()
        return Sampled(tokens, is_last, steps)

    def next_step(self, watch: Stopwatch) -> tuple[Embed, Tensor, SessionCache] | None:
        """Return the Embed after the last sampled tokens, its tokens [1, 1 + G] and cache."""
        watch.begin()
        if self._next is None or self.closed.is_set():
            return None  # no step follows
        watch.queued()
        cache = self._cropped(self._next.pos)
        return self._next, torch.tensor([self._next.tokens]), cache

    def _cropped(self, length: int) -> SessionCache:
        """Return the cache, cropped; raise `CacheMiss` if it cannot be."""
        cache = self._opened_cache()
        crop_cache(cache, length)
        return cache

    def _opened_cache(self) -> SessionCache:
        """Return the cache, made on first use; raise `CacheMiss` if it cannot be."""
        if self.cache is None:
            try:
                self.cache = self._make_cache()
            except (ModelError, RuntimeError, MemoryError) as error:  # the last two: out of memory
                self.cache = self._runners.front.new_cache()
                raise CacheMiss(str(error)) from None
        return self.cache

    def _sample_and_verify(self, logits: Tensor, job: SampleTokens) -> tuple[tuple[int, ...], bool]:
        """Sample from ``logits`` [1 + G, V], and accept the draft tokens that equal the samples.

        Speculative decoding: the first other one is rejected, with all after it, as is what follows
        the answer.

        Return the tokens and whether the last one ends the answer.
        """
        grammar = self._order.grammar
        tokens: list[int] = []
        is_last = False
        for row, draft in zip_longest(logits, job.drafts):
            token = self._forced_at(job.pos + len(tokens))
            if token is None:
                token = sample_token(
                    grammar.masked(row) if grammar else row,
                    self._order.sampling,
                    position=job.pos + len(tokens),
                    history=self._history,
                    prompt_len=self.prompt_tokens + len(self._order.forced),
                    bias=self._order.logit_bias,
                )
            if self._order.on_logits:
                self._order.on_logits(row, token)
            if grammar:
                grammar.take([token])
            tokens.append(token)
            self._history.append(token)
            is_last = self._order.take_token(token)
            if is_last or token != draft:
                break
        return tuple(tokens), is_last

    def _forced_at(self, position: int) -> int | None:
        """Return the token that a position must have; None if it is to be sampled."""
        place = position - self.prompt_tokens
        return self._order.forced[place] if place < len(self._order.forced) else None

    def _look_ahead(self, tokens: tuple[int, ...], job: SampleTokens, *, is_last: bool) -> Steps:
        """Draft what follows the tokens, and note the next step unless the answer ends."""
        steps: Steps = ()
        known, flying = job.pos + len(tokens), job.flying(tokens)
        ends = is_last or known >= job.limit
        try:
            if self._speculator:
                steps = self._draft(self._speculator, tokens, job, ends=ends)
            if ends and self._speculator and not self.embeds:
                self._speculator.keep(self._history)
        except (RuntimeError, MemoryError) as error:  # of a draft model, mostly out of memory
            logger.warning("an answer goes on without drafts: %s", error)
            self._speculator = None
        drafts = steps[0] if steps else ()
        has_room = known + len(flying or ()) + len(drafts) <= job.room
        if flying is None and has_room and not ends:
            self._next = Embed(job.gen, known - 1, (tokens[-1], *drafts), len(drafts))
        elif flying is not None and drafts and not ends:
            self._next = Embed(job.gen, known + len(flying), drafts, len(drafts) - 1)
        return steps

    def _draft(
        self, speculator: Speculator, tokens: tuple[int, ...], job: SampleTokens, *, ends: bool
    ) -> Steps:
        steps = speculator.after(
            tokens,
            job,
            self._clock(),
            prepared=self._runners.prepared,
            ends=ends,
            depth=self.depth,
            sessions=self.sessions,
            beside=self.rows_beside,
        )
        speculator.drafted(self._clock())
        return steps
