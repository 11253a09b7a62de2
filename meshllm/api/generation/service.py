"""The one internal request behind every dialect: who asks which model, within which limits."""

import asyncio
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from meshllm.api.access.accounts import Accounts, ApiKey, KeyLimits, KeyUsage, is_of_owner
from meshllm.api.failure import INVALID, LATER, RETRY_S, Failure, Refused
from meshllm.api.port import ModelPort
from meshllm.api.respond import LongReader
from meshllm.errors import ContextTooLong, MeshError
from meshllm.merge import merge
from meshllm.names import bits_of
from meshllm.node.requests.held_bytes import HeldBytes, size_of
from meshllm.outline.backend import OutlineBackend
from meshllm.outline.eligibility import OutlineMode, most_reads, most_tokens
from meshllm.protocol.kv_cache.prefix_scope import OWNERS, SECRET_BYTES, ScopeNames
from meshllm.protocol.membership.client_quota import ClientQuota, Reservation, estimate
from meshllm.request import Answer, Backend, Event, Piece, Prefilled, Request
from meshllm.status import ModelStatus, as_asked, find_model
from meshllm.strict_json import WrongField
from meshllm.traces.recorder import Recorder

T = TypeVar("T")

MAX_TOGETHER = 8  # generations of one request at a time; the next ones start as these end

IndexedEvent: TypeAlias = tuple[int, Event]
"""An event, and the place of the request to which it belongs."""

_IndexedEvents: TypeAlias = AsyncGenerator[IndexedEvent, None]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tally:
    """The usage of one generation, known so far."""

    asked: Request
    is_provided: bool
    """An engine tells no token ids: until its answer counts them, a piece is one."""
    read: int = 0
    cached: int = 0
    written: int = 0

    def take(self, event: Event) -> None:
        match event:
            case Prefilled(done=done) if self.asked.computes:
                self.read = done
            case Piece(tokens=tokens):
                self.written += 1 if self.is_provided else len(tokens)
            case Answer() if self.asked.computes:
                self.read, self.cached = event.prompt_tokens, event.cached_tokens
                self.written = event.written_for(self.asked)


def _untimed(events: _IndexedEvents) -> _IndexedEvents:
    return events


@dataclass(slots=True)
class Service:
    """Models that answer, to keys within their limits; counts what they use."""

    node: ModelPort
    accounts: Accounts | None = None
    """None keeps no account: the owner's own requests."""
    recorder: Recorder | None = None
    """Of the trace of its requests, if there is one."""
    _owners: LongReader = field(default_factory=LongReader)
    _others: LongReader = field(default_factory=LongReader)
    _bodies: HeldBytes = field(default_factory=HeldBytes)
    _held: HeldBytes = field(default_factory=HeldBytes)
    """All requests of an answer: the node counts those that have begun."""
    _running: Counter[str] = field(default_factory=Counter)
    _quota: ClientQuota = field(default_factory=lambda: ClientQuota("key"))
    _is_closing: bool = False
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request ends."""
    _scopes: ScopeNames = field(default_factory=lambda: ScopeNames(os.urandom(SECRET_BYTES)))

    async def models(self, key: ApiKey | None) -> Sequence[ModelStatus]:
        """List the models that a key may use."""
        return _allowed(key, await self.node.models())

    async def model(self, key: ApiKey | None, name: str) -> ModelStatus:
        """Return a model by name; raise `Refused` if it is not served, yet or to this key."""
        return (await self.quantisations(key, name))[0]

    async def quantisations(self, key: ApiKey | None, name: str) -> Sequence[ModelStatus]:
        """Return a model by name, and after it those that share this name, the most precise first.

        A name with a precision means rings only.

        Raises:
            Refused: it is not served, yet or to this key.
        """
        of_all = await self.node.models()
        served = _allowed(key, of_all)
        if found := find_model(served, name):
            if name == found.precise_name:
                return [as_asked(found, name)]
            sharing = (each for each in served if each.key and each.shared_name == name)
            others = [each for each in sharing if each.key != found.key]
            return [found, *sorted(others, key=lambda it: -bits_of(it.weight_precision))]
        if not of_all:  # such as while a node that has just started loads
            raise Refused("No model is served yet", LATER, hint="see `meshllm ring status`")
        listed = ", ".join(f"`{each.name}`" for each in served) or "no model to this key"
        raise Refused(
            f"The model `{name[:100]}` is not served here",
            Failure(404, INVALID, "model_not_found", "model"),
            hint=f"served: {listed}",
        )

    @contextmanager
    def receiving(self, key: ApiKey | None) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes of a body of a key, until the context ends.

        It raises `Busy` for too many bytes of bodies that arrive, or wait to be read.
        """
        with ExitStack() as held:
            yield lambda size: held.enter_context(self._bodies.holding(_asker(key), size))

    async def read(self, key: ApiKey | None, data: bytes, convert: Callable[[object], T]) -> T:
        """Convert the JSON of a request, see `LongReader`; the owner waits for nobody else."""
        reader = self._owners if is_of_owner(key) else self._others
        return await reader.read(key.name if key else "", data, convert)

    async def answer(
        self,
        key: ApiKey | None,
        model: ModelStatus,
        asked: Sequence[Request],
        outline: OutlineMode | None = None,
        timed: Callable[[_IndexedEvents], _IndexedEvents] = _untimed,
    ) -> _IndexedEvents:
        """Yield the events of all requests, each with the place of its own, see `Backend`.

        They are one request of the key, accounted for at its end; an error in one ends all, as does
        one of ``timed``, which limits the time of all events.

        Raises:
            Busy: too many bytes of its prompts are in progress.
            ContextTooLong: a prompt has more token ids than the model takes.
            QuotaUsed: it has no tokens left today, for all of this.
        """
        tallies, errors = [_Tally(each, bool(model.providers)) for each in asked], 0
        try:
            asked = [_fitting(model, each) for each in asked]
            await self._learn_usage(key)
            asked = [self._scoped(key, within_limits(key, each)) for each in asked]
            outline = self._affordable(key, asked, outline)
            reserving = self._reserved(key, asked, outline)
            with self._held.holding(_asker(key), size_of(*asked)), reserving as reserved:
                node = self._recorded(model, asked)
                backend = OutlineBackend(node, outline) if outline else node
                name = model.name if model.providers or model.key else ""  # the only one
                streams = [backend.generate(replace(each.request, model=name)) for each in reserved]
                async with aclosing(timed(merge(streams, MAX_TOGETHER))) as events:
                    async for place, event in events:
                        tallies[place].take(event)
                        reserved[place].take(event, time.time())
                        yield place, event
        except MeshError:
            errors = 1
            raise
        finally:
            read, cached, written = (
                sum(getattr(each, name) for each in tallies)
                for name in ("read", "cached", "written")
            )
            await self._record(key, model, KeyUsage(1, errors, read, cached, written))

    def _scoped(self, key: ApiKey | None, asked: Request) -> Request:
        """Keep what a key asks apart from the prompts of others, such as the owner's own."""
        if self.accounts is None:
            return asked
        whose = OWNERS if is_of_owner(key) else ""
        return replace(asked, scope=whose + self._scopes.name(key.name.encode() if key else b""))

    async def _learn_usage(self, key: ApiKey | None) -> None:
        """Count what a key with a limit has used today, at other API servers or before this one."""
        if key is None or key.limits.tokens_per_day is None or self.accounts is None:
            return
        now = time.time()
        used = await asyncio.to_thread(self.accounts.tokens, day_of(now), key.name)
        self._quota.learn(key.name, used, now)

    @contextmanager
    def _reserved(
        self, key: ApiKey | None, asked: Sequence[Request], outline: OutlineMode | None
    ) -> Iterator[Sequence[Reservation]]:
        """Reserve the tokens of a key for requests; count what was computed at the end."""
        name, limits = (key.name, key.limits) if key else ("", KeyLimits())
        if error := self._quota.objection(name, limits, time.time()):
            raise error
        with ExitStack() as stack:
            reserved = []
            for each in asked:
                reads = most_reads(each, outline)
                made = self._quota.reserve(name, limits, each, time.time(), reads=reads)
                reserved.append(made)
                stack.callback(lambda each: each.end(time.time()), made)
            yield reserved

    def _affordable(
        self, key: ApiKey | None, asked: Sequence[Request], outline: OutlineMode | None
    ) -> OutlineMode | None:
        """Return when to outline; an outlined answer reads its prompt for each point again.

        Raises:
            QuotaUsed: it must be outlined, and the key has too few tokens left for that.
        """
        if key is None or outline is None or not key.limits.tokens_per_day:
            return outline
        now = time.time()
        wanted = sum(
            most_reads(each, outline) * estimate(each) + most_tokens(each) for each in asked
        )
        if wanted <= (left := self._quota.left(key.name, key.limits, now)):
            return outline
        if outline is OutlineMode.AUTO:
            return None
        text = f"An outlined answer may take {wanted} tokens; {left} of today (UTC) are left"
        raise self._quota.refusal(text, key.name, key.limits, wanted, now)

    def _recorded(self, model: ModelStatus, asked: Sequence[Request]) -> Backend:
        """Return what answers; it records requests in the trace that generate text."""
        if self.recorder is None or any(each.embeds or not each.computes for each in asked):
            return self.node
        return self.recorder.traced(self.node, model.name)

    @contextmanager
    def counted(self, key: ApiKey | None) -> Iterator[None]:
        """Count a request until the end of its answer.

        Raises:
            Refused: the key has too many, or this server closes.
        """
        if self._is_closing:
            raise Refused("This server is closing", LATER, hint="ask another node")
        name = key.name if key else ""
        most = key.limits.concurrency if key else None
        if most is not None and self._running[name] >= most:
            raise Refused(
                f"The key `{name}` has {most} requests in progress, its limit",
                Failure(429, "requests", "rate_limit_exceeded", retry_s=RETRY_S),
            )
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1
            self._ended.set()

    async def close(self) -> None:
        """Refuse further requests, and wait until those in progress have ended."""
        self._is_closing = True
        while self._running.total():
            self._ended.clear()
            await self._ended.wait()

    async def _record(self, key: ApiKey | None, model: ModelStatus, used: KeyUsage) -> None:
        if self.accounts is None:
            return
        day, name = day_of(time.time()), key.name if key else ""
        try:
            await asyncio.to_thread(self.accounts.record, day, name, model.name, used)
        except sqlite3.Error as error:  # such as a full disk: the answer is worth more
            logger.warning("the usage of a request is not recorded: %s", error)


def day_of(seconds: float) -> str:
    """Return the day of a Unix time in UTC, as `2026-11-25`."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _asker(key: ApiKey | None) -> str | None:
    """Return who asks, see `HeldBytes`; None is the owner."""
    return None if key is None or key.is_owner else key.name


def _fitting(model: ModelStatus, asked: Request) -> Request:
    """Return the request, if what answers takes this many token ids; the entry checks texts.

    Raises:
        ContextTooLong: the only ring or provider does not.
    """
    count = len(asked.ids)
    if 0 < model.context < count and len(model.providers) <= 1:  # else of the smallest provider
        raise ContextTooLong(
            f"This model's maximum context length is {model.context} tokens; the prompt has {count}"
        )
    return asked


def within_limits(key: ApiKey | None, asked: Request) -> Request:
    """Return a request within the trust and the limits of its key.

    Raises:
        WrongField: it trusts nodes that the key does not trust.
    """
    return _limited(key, _trusting(key, asked))


def _trusting(key: ApiKey | None, asked: Request) -> Request:
    """Return a request that only the trusted nodes of its key see; it may name some of them.

    Raises:
        WrongField: it names others.
    """
    trusted = key.limits.trust if key else ()
    if not trusted:
        return asked
    if strangers := [each for each in asked.trusted or () if each not in trusted]:
        text = f"The key does not trust the node `{strangers[0][:100]}`"
        raise WrongField("meshllm.trust", text, hint=f"it trusts {', '.join(trusted)}")
    return asked if asked.trusted is not None else replace(asked, trusted=trusted)


def _limited(key: ApiKey | None, asked: Request) -> Request:
    """Return a request whose reasoning is within the limit of its key; its own may be lower."""
    most, own = key.limits.max_reasoning if key else None, asked.max_reasoning
    if most is None or not asked.turns or asked.max_tokens == 0:  # then there is no reasoning
        return asked
    return replace(asked, max_reasoning=most if own is None else min(own, most))


def _allowed(key: ApiKey | None, models: Sequence[ModelStatus]) -> Sequence[ModelStatus]:
    """Return the models that a key may use."""
    allowed = set(key.limits.models) if key else set()
    if not allowed:
        return models
    return [
        each if allowed & {each.shared_name, *each.aliases} else as_asked(each, each.precise_name)
        for each in models
        if allowed & {each.shared_name, each.precise_name, *each.aliases}
    ]
