"""Entry and stages on an unreliable network with a manual clock; one seed determines everything.

The toy layers answer a row with a hash of the whole cached prefix, so a stale, missing or reordered
row on any rank changes the tokens. Every hop goes through the codec.
"""

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import accumulate, chain, count, pairwise, zip_longest
from operator import itemgetter
from random import Random
from typing import Any

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget, KvCapacity
from meshllm.protocol.kv_cache.prefix_index import PrefixHit, PrefixIndex
from meshllm.protocol.session import actions, stage
from meshllm.protocol.session.actions import (
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
from meshllm.protocol.session.blob import check, seal, session_key
from meshllm.protocol.session.codec import MAX_POSITION, MalformedMessage, decode, encode
from meshllm.protocol.session.entry import Entry, EntryState
from meshllm.protocol.session.messages import (
    Blob,
    Cancel,
    Close,
    Data,
    Delivered,
    DType,
    FaultCode,
    Flags,
    Forward,
    Gap,
    JobTimes,
    Resume,
    SessionMessage,
)
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import Adopt, Compute, Free, Keep, Stage, Withdraw
from meshllm.protocol.session.waiting import PromptQueue
from meshllm.request import FinishReason

Event = tuple[float, int, Callable[[], object]]
"""When, in which order, and what."""

VOCABULARY = 7
LONGEST_CHUNK = 6
END = 10_000.0  # s; far beyond every deadline and retry


def mix(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def run_layers(rank: int, cache: list[int], rows: list[int]) -> list[int]:
    """Append rows to a cache; the output of a row is a chain of hashes over all before it."""
    for row in rows:
        cache.append(mix(rank, cache[-1] if cache else 0, row))
    return cache[-len(rows) :]


def reference(ring: int, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """Generate in one place, without any protocol."""
    caches: list[list[int]] = [[] for _ in range(ring)]
    answer: list[int] = []
    rows = list(prompt)
    for _ in range(tokens):
        for rank, cache in enumerate(caches):
            rows = run_layers(rank, cache, rows)
        rows = [rows[-1] % VOCABULARY]
        answer += rows
    return answer


def pack(session: SessionId, rows: list[int]) -> Blob:
    payload = struct.pack(f"<{len(rows)}Q", *rows)
    return seal(session_key(session), DType.FLOAT32, (1, len(rows), 2), payload)


def unpack(session: SessionId, blob: Blob) -> list[int]:
    check(session_key(session), blob)
    return list(struct.unpack(f"<{len(blob.payload) // 8}Q", blob.payload))


@dataclass(frozen=True)
class Weather:
    """Faults of the network: probabilities per message."""

    drop: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    lag: float = 1.0
    """Longest delay of Data, s; control takes up to 1."""
    cancels: float = 0.3
    """Probability per session."""
    patience_s: tuple[float, ...] = (4.0, 12.0)
    """A trip takes up to 8 s and more, so the shorter one restarts for nothing."""
    idle_s: float = END
    drafts: int = 3
    """Maximum draft tokens in a step; some are right."""
    steps: int = 1
    """Maximum draft steps in flight; several need links that neither lose nor reorder."""
    follow: float = 0.6
    """Probability that another session resumes a finished one."""
    misses: float = 0.05
    """Probability that a rank cannot resume from its kept cache."""
    tokens: int = 8
    """Of an answer, at most."""
    invalid: float = 0.0
    """Probability that the content of a message becomes invalid."""
    poison: bool = False
    """Rows of an older gen become garbage in flight, like rejected drafts."""


QUIET = Weather(cancels=0.0, patience_s=(END,), drafts=0, follow=0.0)
CALM = Weather(poison=True)
RUSH = Weather(lag=6.0, cancels=0.8, poison=True)
CROWD = Weather(lag=3.0, poison=True, steps=6, tokens=24, patience_s=(20.0, 60.0))
DOZE = Weather(poison=True, steps=6, tokens=24, idle_s=8.0)
STORM = Weather(drop=0.02, repeat=0.05, reorder=0.05)
NAPS = Weather(drop=0.02, idle_s=10.0)
INVALID = Weather(lag=3.0, invalid=0.01)
FLOOD = Weather(repeat=0.3, reorder=0.5, lag=8.0)


def invalidated(message: SessionMessage) -> SessionMessage:
    """Return a message of which the codec reads nothing but its session; some have none such."""
    match message:
        case Data():
            return replace(message, rows=0)
        case Gap():
            return replace(message, kv_len=MAX_POSITION + 1)
        case Close():
            return replace(message, keep=MAX_POSITION + 1)
        case Resume():
            return replace(message, length=0)
        case _:
            return message


@dataclass
class Generation:
    """State of one session in the driver of rank 0."""

    task: GenerationTask
    pace: PrefillPacing
    entry: Entry
    base: PrefixHit | None
    text: list[int]
    """The right answer."""
    answer: list[int] = field(default_factory=list)
    outcome: Done | Failed | None = None
    closed: Closed | None = None
    progress: list[int] = field(default_factory=list)


class Simulation:
    """A ring of machines, one worker per rank, and the network between them."""

    def __init__(
        self,
        seed: int,
        weather: Weather,
        *,
        entry: type[Entry] = Entry,
        stage: type[Stage] = Stage,
        crops: bool = True,
    ) -> None:
        self.random = Random(seed)
        self.weather = weather
        self.crops = crops
        self.now = 0.0
        self.events: list[Event] = []
        self.order = count()
        self.latest: dict[tuple[int, bool], float] = {}
        self.sent: Counter[type[SessionMessage]] = Counter()
        self.ring = self.random.randint(1, 5)
        self.stages = {
            rank: stage(
                rank,
                self.ring,
                epoch=1,
                idle_s=weather.idle_s,
                index=self.index(),
            )
            for rank in range(1, self.ring)
        }
        self.kept: list[dict[SessionId, list[int]]] = [{} for _ in range(self.ring)]
        self.missing: set[tuple[int, SessionId]] = set()  # whose base was unavailable
        self.prompts = PromptQueue(LONGEST_CHUNK + self.random.randrange(LONGEST_CHUNK))
        self.begins: dict[tuple[int, SessionId], tuple[float, Compute]] = {}
        """When the latest rows of a session begin to be computed, by rank."""
        self.dropped: list[Compute] = []
        self.unbegun: set[tuple[int, SessionId]] = set()  # whose first rows were dropped
        self.reused = 0
        self.flights: Counter[int] = Counter()  # steps in flight at each returned one
        self.caches: list[dict[SessionId, list[int]]] = [{} for _ in range(self.ring)]
        self.committed: list[dict[SessionId, list[int]]] = [{} for _ in range(self.ring)]
        """Rows that a rank has called committed, as they were then."""
        self.garbled = set[SessionId]()
        """Sessions of which a chunk of the prompt became garbage."""
        self.busy_until = [0.0] * self.ring
        self.told: list[Counter[SessionId]] = [Counter() for _ in range(self.ring)]
        self.generations: dict[SessionId, Generation] = {}
        for number in range(self.random.randint(1, 3)):
            self.add(number, entry)

    def index(self) -> PrefixIndex:
        budget = KvBudget([KvCapacity(8 * BLOCK, lambda tokens: (tokens, 0))])
        return PrefixIndex(budget, self.random.choice((0, 2 * BLOCK, *(None,) * 3)), idle_s=2 * END)

    def add(self, number: int, entry: type[Entry]) -> Generation:
        draw = self.random
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 16)))
        return self.begin(number, entry, prompt, None)

    def begin(
        self, number: int, entry: type[Entry], prompt: tuple[int, ...], base: PrefixHit | None
    ) -> Generation:
        draw = self.random
        session, most = SessionId(bytes([number] * 16)), self.weather.tokens
        context = len(prompt) + draw.randint(1, most * 3 // 2)
        task = GenerationTask(
            session,
            1,
            self.ring,
            prompt,
            draw.randint(1, most),
            context,
            keep_from=draw.choice((1, 9)),
        )
        patience = draw.choice(self.weather.patience_s)
        pace = PrefillPacing(
            draw.randint(1, LONGEST_CHUNK), draw.randint(1, 4), patience, retries=5, close_s=40.0
        )
        longest = min(task.max_tokens, task.context - len(prompt))
        text = reference(self.ring, prompt, longest)
        room = len(prompt) + draw.randint(1, most)  # for the first tokens of the answer
        generation = Generation(task, pace, entry(task, pace, self.prompts, room), base, text)
        self.generations[task.session] = generation
        if draw.random() < self.weather.cancels:
            self.at(self.now + draw.random() * 60, self.cancel, generation)
        return generation

    def follow(self, one: Generation) -> None:
        """Resume a finished session once or twice: after a prefix of it, with other texts."""
        draw, kept = self.random, one.entry.kept
        cache = self.caches[0].pop(one.task.session)
        for left in reversed(range(draw.randint(1, 2))):
            length = draw.randint(1, len(kept))
            rest = (draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5)))
            whole = left == 0 and draw.random() < 0.5
            base = PrefixHit(one.task.session, length, whole)
            number = len(self.generations)
            generation = self.begin(number, type(one.entry), (*kept[:length], *rest), base)
            if draw.random() > self.weather.misses:
                self.caches[0][generation.task.session] = list(cache)
            self.drive(generation, generation.entry.open(self.now, base))

    # What happens when.

    def at(self, time: float, act: Callable[..., object], *arguments: object) -> None:
        event: Event = time, next(self.order), partial(act, *arguments)
        heappush(self.events, event)

    def run(self) -> None:
        """Run until nothing is due; the idle timeout of the stages comes last."""
        for generation in self.generations.values():
            self.drive(generation, generation.entry.open(0.0))
        while self.events or self.is_busy:
            assert self.step(before=END), "a session never ends"
        if not self.weather.drop:
            assert not any(self.caches), "a cache outlived its session"
        while self.step(before=3 * END):
            pass
        assert not any(self.caches), "a cache outlived the idle limit"
        assert not any(self.kept), "what was kept outlived its own"

    @property
    def is_busy(self) -> bool:
        """Whether a generation has not ended on all ranks."""
        return any(one.entry.state is not EntryState.CLOSED for one in self.generations.values())

    def step(self, before: float) -> bool:
        """Run the next event or deadline; return False if none is due in time."""
        due: list[tuple[float | None, Callable[[], None]]] = [
            (one.entry.deadline, partial(self.expire_entry, one))
            for one in self.generations.values()
        ]
        due += [(self.stages[rank].deadline, partial(self.expire, rank)) for rank in self.stages]
        due += [(time, self.happen) for time, _, _ in self.events[:1]]
        timed = [(time, act) for time, act in due if time is not None and time < before]
        if timed:
            time, act = min(timed, key=itemgetter(0))
            self.now = max(self.now, time)
            act()
        return bool(timed)

    def happen(self) -> None:
        heappop(self.events)[2]()

    def work(self, rank: int, job: Callable[[], object]) -> float:
        """Queue a job on the one worker of a rank; return when it begins."""
        start = max(self.now, self.busy_until[rank])
        self.busy_until[rank] = start + self.random.random() * 0.5
        self.at(self.busy_until[rank], job)
        return start

    # The network.

    def send(self, source: int, forward: Forward) -> None:
        draw, weather = self.random, self.weather
        self.sent[type(forward.message)] += 1
        for _ in range(1 + (draw.random() < weather.repeat)):
            if draw.random() < weather.drop:
                continue
            arrival = self.now + 0.1 + draw.random() * (1.0 if forward.control else weather.lag)
            if draw.random() >= weather.reorder:
                arrival = max(arrival, self.latest.get((source, forward.control), 0.0))
                self.latest[source, forward.control] = arrival
            is_invalid = weather.invalid and draw.random() < weather.invalid
            message = invalidated(forward.message) if is_invalid else forward.message
            wire = b"".join(encode(message))
            self.at(arrival, self.deliver, (source + 1) % self.ring, wire)

    def deliver(self, rank: int, wire: bytes) -> None:
        message: Delivered
        try:
            sent = decode(wire)
            assert isinstance(sent, SessionMessage)
            message = self.poisoned(sent) if self.weather.poison else sent
        except MalformedMessage as fault:
            message = fault.message
        if rank == 0:
            generation = self.generations[message.session]
            self.drive(generation, generation.entry.receive(message, self.now))
            return
        if isinstance(message, Data | Cancel) and message.session in self.caches[rank]:
            self.told[rank][message.session] = max(self.told[rank][message.session], message.gen)
        self.act(rank, self.stages[rank].receive(message, self.now))

    def poisoned(self, message: SessionMessage) -> SessionMessage:
        if not isinstance(message, Data) or message.blob is None:
            return message
        if message.gen == self.told[0][message.session]:
            return message
        if message.flags & Flags.PREFILL:
            self.garbled.add(message.session)
        return replace(message, blob=pack(message.session, [666] * message.blob.shape[1]))

    # The driver of a stage.

    def act(self, rank: int, actions: Sequence[stage.Action]) -> None:
        for action in actions:
            match action:
                case Compute(session):
                    begin = self.work(rank, partial(self.compute, rank, action))
                    self.begins[rank, session] = begin, action
                case Withdraw(session):
                    self.drop(rank, session)
                case Free(session):
                    del self.told[rank][session]
                    self.work(rank, partial(self.free, rank, session))
                case Keep(session):
                    del self.told[rank][session]
                    self.work(rank, partial(self.keep, rank, session))
                case Adopt():
                    self.work(rank, partial(self.adopt, rank, action))
                case Forward():
                    self.pass_on(rank, action)
        self.check_room(rank)

    def pass_on(self, rank: int, forward: Forward) -> None:
        message = forward.message
        if isinstance(message, Data):
            assert message.gen >= self.told[rank][message.session], "stale rows went on"
        self.send(rank, forward)

    def drop(self, rank: int, session: SessionId) -> None:
        """Do not compute the latest rows of a session, unless they have begun."""
        begin, compute = self.begins[rank, session]
        if begin > self.now:
            self.dropped.append(compute)
            self.unbegun.add((rank, session))
            self.act(rank, self.stages[rank].withdrawn(session))

    def check_room(self, rank: int) -> None:
        """Check that rows of prompts keep to their room, beside a chunk that was given up."""
        if self.weather.repeat or self.weather.reorder:  # more arrives than was sent
            return
        stage = self.stages[rank]
        states = stage._sessions.values()
        waiting = (data for state in states for data, _ in state.pending)
        running = (state.running for state in states if state.running)
        prompts = [
            data.rows
            for data in chain(waiting, running, stage._outliving.values())
            if Flags.PREFILL in data.flags
        ]
        assert sum(prompts) <= self.prompts.most_rows + LONGEST_CHUNK, "prompts exceed their room"

    def free(self, rank: int, session: SessionId) -> None:
        is_begun = session in self.caches[rank] or (rank, session) not in self.unbegun
        is_empty = not is_begun or (rank, session) in self.missing
        self.missing.discard((rank, session))
        self.unbegun.discard((rank, session))
        if not is_empty:
            del (self.caches if session in self.caches[rank] else self.kept)[rank][session]

    def keep(self, rank: int, session: SessionId) -> None:
        is_missing = (rank, session) in self.missing  # and it ended unnoticed
        self.missing.discard((rank, session))
        self.unbegun.discard((rank, session))
        self.kept[rank][session] = [] if is_missing else self.caches[rank].pop(session)

    def adopt(self, rank: int, adopt: Adopt) -> None:
        kept = self.kept[rank]
        whole = kept.pop(adopt.base) if adopt.whole else kept[adopt.base]
        assert len(whole) >= adopt.length or not whole
        if whole and self.random.random() > self.weather.misses:
            self.caches[rank][adopt.session] = list(whole)
        else:
            self.missing.add((rank, adopt.session))

    def compute(self, rank: int, compute: Compute) -> None:
        if any(each is compute for each in self.dropped):
            return
        if (rank, compute.session) in self.missing and compute.pos:
            self.act(rank, self.stages[rank].missed(compute.session))
            return
        self.missing.discard((rank, compute.session))
        self.unbegun.discard((rank, compute.session))
        assert compute.blob is not None
        out = self.layers(rank, compute.session, compute.pos, unpack(compute.session, compute.blob))
        kept = out[len(out) - compute.keep :]
        blob = pack(compute.session, kept) if kept else None
        stage = self.stages[rank]
        self.act(rank, stage.computed(compute.session, blob, self.now, JobTimes(10, 2, 1)))
        if (session := compute.session) in self.caches[rank]:
            copied = self.committed[rank].setdefault(session, [])
            copied += self.caches[rank][session][len(copied) : stage.committed.get(session, 0)]

    def layers(self, rank: int, session: SessionId, pos: int, rows: list[int]) -> list[int]:
        cache = self.caches[rank].setdefault(session, [])
        assert pos <= len(cache), "a gap in the cache"
        if self.crops:
            del cache[pos:]
        return run_layers(rank, cache, rows)

    def expire(self, rank: int) -> None:
        self.act(rank, self.stages[rank].expire(self.now))

    # The driver of the entry.

    def grown(self, one: Generation) -> None:
        self.drive(one, one.entry.grown())

    def drive(self, one: Generation, actions: Sequence[actions.Action]) -> None:
        if (session := one.task.session) in self.caches[0]:
            copied = self.committed[0].setdefault(session, [])
            copied += self.caches[0][session][len(copied) : one.entry.committed]
        for action in actions:
            match action:
                case Embed():
                    assert action.pos + len(action.tokens) <= one.entry._room, "beyond its room"
                    self.work(0, partial(self.embed, one, action))
                case SampleTokens():
                    self.work(0, partial(self.pick, one, action))
                case Forward(message):
                    if isinstance(message, Data | Cancel):
                        self.told[0][message.session] = message.gen
                    self.send(0, action)
                case _:
                    self.note(one, action)
        while (turn := self.prompts.next()) is not None:
            self.drive(self.generations[turn], self.generations[turn].entry.proceed())

    def note(
        self, one: Generation, action: Emit | Reserve | Progress | Done | Failed | Closed
    ) -> None:
        match action:
            case Reserve():
                wait_s = self.random.choice((0.0, self.random.random() * 30))
                self.at(self.now + wait_s, self.grown, one)
            case Emit(token):
                one.answer.append(token)
            case Progress(done):
                one.progress.append(done)
            case Done() | Failed():
                assert one.outcome is None
                one.outcome = action
            case Closed():
                assert one.closed is None
                one.closed = action
                self.reused += one.entry.reused
                self.work(0, partial(self.closed, one))

    def closed(self, one: Generation) -> None:
        is_followed = len(self.generations) < 9 and self.random.random() < self.weather.follow
        if one.entry.kept and is_followed:
            self.follow(one)
        else:
            self.caches[0].pop(one.task.session, None)

    def embed(self, one: Generation, embed: Embed) -> None:
        session = one.task.session
        if one.base and embed.pos and session not in self.caches[0]:
            self.drive(one, one.entry.missed(self.now))
            return
        out = self.layers(0, session, embed.pos, list(embed.tokens))
        blob = pack(session, out) if self.ring > 1 else None
        self.drive(one, one.entry.computed(blob, self.now))

    def pick(self, one: Generation, pick: SampleTokens) -> None:
        session, limit = one.task.session, pick.limit - pick.pos
        self.flights[1 + len(one.entry._flight)] += 1
        rows = unpack(session, pick.blob) if pick.blob else self.caches[0][session]
        rows = rows[-1 - len(pick.drafts) :]
        assert len(rows) == 1 + len(pick.drafts)
        assert pick.pos == len(one.task.prompt) + len(one.answer)
        tokens: list[int] = []
        for row, draft in zip_longest(rows, pick.drafts):
            tokens.append(row % VOCABULARY)
            if tokens[-1] != draft or len(tokens) == limit:
                break
        self.drive(one, one.entry.sampled(tokens, self.now, self.steps(one, pick, tokens)))

    def steps(
        self, one: Generation, pick: SampleTokens, tokens: list[int]
    ) -> list[tuple[int, ...]]:
        """Draft nothing, the right tokens, or any tokens."""
        draw, flying = self.random, pick.flying(tokens)
        sizes = [draw.randint(0, self.weather.drafts)]
        if self.weather.steps > 1:
            sizes += [1 + draw.randrange(3) for _ in range(draw.randrange(self.weather.steps))]
        behind = len(tokens) + len(flying or ())
        right = one.text[len(one.answer) + behind :][: sum(sizes)]
        wrong = draw.choice((0.0, 0.0, 0.1, 1.0))
        drafts = [draw.randrange(VOCABULARY) if draw.random() < wrong else each for each in right]
        steps = [
            tuple(drafts[end - size : end])
            for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        return [step for step in steps if step]

    def expire_entry(self, one: Generation) -> None:
        self.drive(one, one.entry.expire(self.now))

    def cancel(self, one: Generation) -> None:
        self.drive(one, one.entry.finish(FinishReason.CANCELLED, self.now))


def authorize(simulation: Simulation) -> Counter[str]:
    """Check every generation against the reference; count how they ended."""
    ends: Counter[str] = Counter()
    for one in simulation.generations.values():
        assert one.answer == one.text[: len(one.answer)], "wrong tokens"
        assert all(before < after for before, after in pairwise(one.progress))
        assert one.closed is not None
        rows: list[int] = [*one.task.prompt, *one.text]
        for rank, committed in enumerate(simulation.committed):
            if one.task.session in simulation.garbled:
                break
            rows = run_layers(rank, [], rows)
            copied = committed.get(one.task.session, [])
            assert copied == rows[: len(copied)], "rows that a draft took back were committed"
        match one.outcome:
            case Failed(FaultCode.RULES) if simulation.weather.invalid:
                ends["refused"] += 1
            case Failed(code, text):
                assert code is FaultCode.TIMED_OUT, text
                ends["failed"] += 1
            case Done(reason):
                assert reason is FinishReason.CANCELLED or one.answer == one.text
                ends[reason] += 1
            case None:
                raise AssertionError("a generation ended without a word")
    return ends


@dataclass
class RankStats:
    """What became of the schedules of one weather."""

    ends: Counter[str] = field(default_factory=Counter)
    """Of generations."""
    flights: Counter[int] = field(default_factory=Counter)
    """Steps in flight at each returned one."""
    cancels: int = 0
    asked: int = 0
    """Rows that a rank was asked to reuse."""
    reused: int = 0


def play(seed: int, weather: Weather, tally: RankStats, **mutation: Any) -> None:
    """Run a schedule, and count what became of it."""
    simulation = Simulation(seed, weather, **mutation)
    try:
        simulation.run()
        tally.ends += authorize(simulation)
        tally.flights += simulation.flights
        tally.cancels += simulation.sent[Cancel]
        bases = (one.base for one in simulation.generations.values())
        tally.asked += sum(base.length for base in bases if base)
        tally.reused += simulation.reused
    except Exception as error:
        error.add_note(f"seed {seed}, {weather}")
        raise
