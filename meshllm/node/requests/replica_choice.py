"""The choice between the rings that serve a model, replicas or one, or between its providers.

Theory of operation ------------------- Requests that begin alike go to the same ring, whose prefix
cache has their beginning. A beginning that this node has not seen goes to one of the least busy
rings; rendezvous hashing ranks those, so that other nodes are likely to choose the same one. Later
requests follow, to where the last one went, while that ring has less than `MARGIN` requests of this
node more in progress than the least busy one, and half as many more as all rings have beyond
`MIN_SESSIONS`: a request shares each ring with many others or waits there, and a move gains less
time than computing the beginning again takes. A node counts its own requests only, which is exact
where one node is the API server, and close where the API servers are used alike. The least busy of
all rings is taken, where others compare two random ones: these counts are exact and free, and
rendezvous hashing already spreads what several nodes send.

A request counts as often as the ring is slower than the fastest, by the time per step in its best
answer of the last `FRESH_S`, so that a ring three times as slow gets a third of the chats. A step
is compared, not a token, since accepted drafts say more of the text than of the ring. Rings that
differ by less than `ALIKE` are alike, since load changes times as well; one whose times are old
counts as fast, and is measured by the next chat. No ring counts as more than `SLOWEST` times as
slow: the times are what its entry says.

A node may be in several of the rings, see `grouping`. Rings that share a node compete for it: a
ring is as busy as the busiest of its nodes, with the requests of all rings of that node.
Of rings that are as busy for this reason, the one with the fewest requests of its own is taken.

The beginning of a chat is all up to its first question, so that its turns go to one ring even if
many chats have a system prompt in common, whose cache all rings have then. A request may name
another text in its place, its affinity, which other requests have in common with it.

A request with a deadline goes to the rings that can write its longest answer by then, by their best
times; each `MIN_SESSIONS` requests of this node in a ring, which slow it or for which it would
wait, take as long again. A ring without times counts as fast enough. If none is, the fastest ones
are taken: most answers are shorter than they may be.

The ring that failed last is avoided while there is another one, and so are those that failed more
often than others. A request that no ring has accepted yet is refused once each of them was asked.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from blake3 import blake3

from meshllm.errors import MeshError
from meshllm.names import NodeId, RingEntry
from meshllm.node.timer import loop_time
from meshllm.protocol.kv_cache.admission import MIN_SESSIONS
from meshllm.request import Answer, Request

MARGIN = 4  # requests; with 2, a third of the hits was lost before chats stayed where they went
ALIKE, SLOWEST = 1.5, 4.0  # ratios of times per step
MIN_STEPS = 16  # of an answer, for a time that counts
MAX_TIMES, FRESH_S = 8, 300.0  # answers of a ring, and for how many seconds each counts
MAX_TIMED = 1024  # rings by the name that was asked for
MAX_KNOWN = 4096  # beginnings whose ring is remembered, some 150 bytes each
BEGINNING_BYTES = 256  # of a prompt without turns, which may go on with an answer and more


@dataclass(slots=True)
class AttemptHistory:
    """The rings that failed to serve a request, and those that could."""

    failed: list[RingEntry] = field(default_factory=list)
    """Entries, once for each failure, the last one at the end."""
    entries: Sequence[RingEntry] = ()
    """Of the rings of the latest choice."""
    entry: RingEntry | None = None
    """Of the ring that was asked last."""

    @property
    def has_other(self) -> bool:
        """Return whether a ring has not failed yet."""
        return not set(self.entries) <= set(self.failed)


class ReplicaChoice:
    """Chooses the entry for each request; counts those of this node that wait or run."""

    def __init__(self, clock: Callable[[], float] = loop_time) -> None:
        self._clock = clock
        self._active: Counter[RingEntry] = Counter()
        self._times: dict[tuple[str, RingEntry], deque[tuple[float, float]]] = {}
        """When the latest answers of each ring of a model ended, and their times per step."""
        self._known: dict[bytes, RingEntry] = {}
        """The ring that each beginning went to last; the oldest are first, and forgotten."""

    def choose(
        self,
        entries: Sequence[RingEntry],
        request: Request,
        tried: AttemptHistory,
        nodes: Callable[[RingEntry], Collection[NodeId]] = lambda entry: (entry.node,),
    ) -> RingEntry:
        """Return the entry of one of the rings; there is at least one.

        ``nodes`` returns those of the ring of an entry, as far as they are known.
        """
        tried.entries = entries
        others = [entry for entry in entries if entry not in tried.failed[-1:]] or entries
        failures = Counter(tried.failed)
        fewest = min(failures[entry] for entry in others)
        others = [entry for entry in others if failures[entry] == fewest]
        others = self._in_time(others, request)
        beginning = _beginning(request)
        slowness = self._slowness(others, request.model)

        busy = self._busy({entry: {entry.node, *nodes(entry)} for entry in entries})

        def load(entry: RingEntry, fewer: int = 0) -> tuple[float, float]:
            own = self._active[entry] + 1 - fewer
            return (busy[entry] + 1 - fewer) * slowness[entry], own * slowness[entry]

        def is_busier(entry: RingEntry) -> bool:
            shared, own = load(entry, MARGIN + more)
            return shared >= least[0] or (load(entry)[0] == least[0] and own >= least[1])

        least = min(map(load, others))
        more = max(0, min(self._active[entry] for entry in others) - MIN_SESSIONS) // 2
        chosen = self._known.pop(beginning, None)
        if chosen not in others or is_busier(chosen):
            idle = (entry for entry in others if load(entry) == least)
            chosen = min(idle, key=lambda entry: _rank(beginning, entry))
        self._known[beginning] = chosen
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return chosen

    def _in_time(self, entries: Sequence[RingEntry], request: Request) -> list[RingEntry]:
        """Return the rings that are fast enough for a deadline; the fastest ones if none is."""
        if not request.deadline_ms:
            return list(entries)
        needs_ms = {
            entry: self._best(entry, request.model)
            * max(0, request.expected_tokens - len(request.given))
            * (1 + self._active[entry] // MIN_SESSIONS)
            for entry in entries
        }
        least = min(needs_ms.values())
        most = request.deadline_ms if least <= request.deadline_ms else ALIKE * least
        return [entry for entry, each in needs_ms.items() if each <= most]

    def _busy(self, rings: Mapping[RingEntry, Collection[NodeId]]) -> dict[RingEntry, int]:
        """Return the requests in progress that the busiest node of each ring has."""
        queues = Counter[NodeId]()
        for entry, nodes in rings.items():
            for node in nodes:
                queues[node] += self._active[entry]
        return {entry: max(queues[node] for node in nodes) for entry, nodes in rings.items()}

    def note(self, entry: RingEntry, model: str, step_ms: float) -> None:
        """Note the time per step of an answer that has ended, see `step_ms`; 0 is unknown."""
        if not 0 < step_ms < inf:
            return
        times = self._times.pop((model, entry), deque[tuple[float, float]](maxlen=MAX_TIMES))
        times.append((self._clock(), step_ms))
        self._times[model, entry] = times
        if len(self._times) > MAX_TIMED:
            del self._times[next(iter(self._times))]

    def _slowness(self, entries: Sequence[RingEntry], model: str) -> dict[RingEntry, float]:
        """Return how many times as slow as the fastest each ring is; 1 for those that are alike."""
        best = {entry: self._best(entry, model) for entry in entries}
        least = min((each for each in best.values() if each), default=inf)
        return {
            entry: min(each / least, SLOWEST) if each > ALIKE * least else 1.0
            for entry, each in best.items()
        }

    def _best(self, entry: RingEntry, model: str) -> float:
        """Return the least time per step measured in the last `FRESH_S`; 0 if unknown."""
        if not (times := self._times.get((model, entry))):
            return 0.0
        since = self._clock() - FRESH_S
        return min((each for ended, each in times if ended >= since), default=0.0)

    @contextmanager
    def asking(self, entry: RingEntry, tried: AttemptHistory) -> Iterator[None]:
        """Count a request that waits or runs; note the entry if an error ends it."""
        self._active[entry] += 1
        tried.entry = entry
        try:
            yield
        except MeshError:
            tried.failed.append(entry)
            raise
        finally:
            self._active[entry] -= 1
            if not self._active[entry]:
                del self._active[entry]


def step_ms(answer: Answer) -> float:
    """Return the mean time of a step of an answer; 0 if it is unknown, or of too few steps."""
    per_step = answer.tokens_per_step
    if per_step <= 0 or answer.completion_tokens <= MIN_STEPS * per_step:
        return 0.0
    return answer.ms_per_token * per_step


def _rank(beginning: bytes, entry: RingEntry) -> bytes:
    """Return what ranks a ring among those for a beginning, the same on every node."""
    return blake3(beginning + entry.node + (entry.group or b"")).digest()


def _beginning(request: Request) -> bytes:
    """Return a hash of what requests for a model with a common prefix have in common."""
    if request.affinity:
        text = f"{request.scope}\n{request.affinity}"
    elif request.ids:
        text = " ".join(map(str, request.ids[: BEGINNING_BYTES // 4]))  # bytes of a token
    elif request.raw is not None:
        text = request.raw[:BEGINNING_BYTES]
    else:
        roles = [turn["role"] for turn in request.turns]
        first = roles.index("user") + 1 if "user" in roles else 1  # an answer may follow it
        text = "\n".join(turn["content"] for turn in request.turns[:first])
    return blake3(f"{request.model}\n{text}".encode(errors="surrogatepass")).digest()
