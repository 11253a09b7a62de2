"""Chunked prefill: how long a prompt takes with a given chunk size, and which size is best.

The same cost model tells how many sessions a ring should run at once.

Theory of operation: the ranks of a ring work on different chunks of a prompt at once, as a
pipeline. Short chunks fill it sooner, long ones read the weights less often, so several sizes are
simulated, chunk by chunk and rank by rank, with the times of the ranks and the links. A row attends
to all rows before it, so later chunks take longer: the attention time per pair of rows is the slope
of the time per row between the two longest entries of a cost table.

On a rank, the steps of other sessions wait for the current chunk (head-of-line blocking). If there
are others, a chunk in the middle of the prompt takes at most `STALL_S`; if not, one may still come
and wait up to `ALONE_STALL_S`. Below `MIN_ROWS` the prompt would lose more than others gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

from meshllm.errors import UserError
from meshllm.names import DIGEST_BYTES, SESSION_ID_BYTES, Digest, SessionId, Span, short
from meshllm.protocol.drafting.window import MAX_STEP_ROWS
from meshllm.protocol.kv_cache.admission import MAX_SESSIONS, MIN_SESSIONS
from meshllm.protocol.planning.plan import Links, LinkSpeed, ModelSizes, Offer, Plan
from meshllm.protocol.session.codec import MAX_ROWS, size
from meshllm.protocol.session.messages import Blob, Data, DType, Flags
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import MAX_PENDING

SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Chunk sizes that are tried, besides the whole prompt."""
STALL_S = 1.0  # of one chunk on one rank; other sessions wait for a token meanwhile
ALONE_STALL_S = 4.0
COPY_ROWS = 32  # rows that take as long as the KV cache copy of stock attention for a chunk
MIN_ROWS = 128  # with chunks half as long, a prompt of 4096 tokens takes a sixth longer
DEFAULT_MAX_ROWS = 256  # rows if no time is known: 1 to 2 s of 28 layers of 1024 on one slow core

_NEAR_FASTEST = 1.1  # times the rate of fewer sessions
_SESSIONS_STEP = 4
_NEAR_BEST = 1.03  # times the least time: longer chunks save messages, and costs that no table has
_MAX_SIMULATED = 8192  # tokens of a prompt that are simulated: more change little, and take time
_ROUNDING = 0.01  # of a chunk
_DEFAULT_START = 72  # rows that take as long as reading the weights: Qwen3-0.6B in bf16 on a CPU


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Cost model of one rank."""

    offer: Offer
    layers: float
    """Layers of its span, in units of an average layer of the model."""
    speed: LinkSpeed
    """To the next rank."""

    def compute_s(self, rows: int, before: int = 0) -> float:
        """Return the seconds of its layers for ``rows`` rows that attend to ``before`` others."""
        table = self.offer.layer_s
        pairs = (rows + COPY_ROWS) * before + _extra_pairs(table, rows)
        return self.layers * (self.offer.layer_seconds(rows) + _attention_s(table) * pairs)


@dataclass(frozen=True, slots=True)
class RingTimes:
    """Cost model of a ring."""

    ranks: tuple[RankTimes, ...]
    head_s: float
    """Seconds of the head on the entry, for one row."""
    row_bytes: int
    """Size of one row on the wire."""
    header_bytes: int = 0
    """Size of a message without its rows."""

    def message_bytes(self, rows: int) -> int:
        """Return the size of a message of ``rows`` rows, which may be 0."""
        return rows * self.row_bytes + self.header_bytes

    def wire_s(self, rank: int, rows: int) -> float:
        """Return the seconds of ``rows`` rows from a rank to the next."""
        return self.ranks[rank].speed.seconds(self.message_bytes(rows))

    def step_s(self, rows: int) -> float:
        """Return the seconds of one trip round the ring."""
        speeds = (self.wire_s(rank, rows) for rank in range(len(self.ranks)))
        return self._head_s(rows) + sum(rank.compute_s(rows) for rank in self.ranks) + sum(speeds)

    @property
    def best_sessions(self) -> int:
        """The fewest sessions at once with which the ring is nearly as fast as it can be.

        With more, each text would come more slowly, and others would not come sooner. Below
        `MIN_SESSIONS`, a short answer would wait too long for a place.
        """
        counts = range(MIN_SESSIONS, MAX_SESSIONS + 1, _SESSIONS_STEP)
        rates = {sessions: sessions / self._period_s(sessions) for sessions in counts}
        near = max(rates.values()) / _NEAR_FASTEST
        return min(sessions for sessions, rate in rates.items() if rate >= near)

    def _period_s(self, sessions: int) -> float:
        """Return the seconds in which each session gets a token, in as many groups as are best."""
        least = ceil(sessions / MAX_STEP_ROWS)
        return min(self._grouped_s(sessions, groups) for groups in range(least, sessions + 1))

    def _grouped_s(self, sessions: int, groups: int) -> float:
        """Return the same for groups, of which each rank and each link takes one at a time."""
        rows = ceil(sessions / groups)
        busy = [rank.compute_s(rows) for rank in self.ranks]
        busy[0] += self._head_s(rows)
        links = [self._transmit_s(at, rows) for at in range(len(self.ranks))]
        return max(self.step_s(rows), groups * max(*busy, *links))

    def _head_s(self, rows: int) -> float:
        """Return the seconds of the head, which scales with rows like a layer."""
        first = self.ranks[0].offer
        return self.head_s * first.layer_seconds(rows) / first.layer_seconds(1)

    def first_token_s(self, prompt: int, pace: PrefillPacing) -> float:
        """Return the seconds to the first token after a prompt of ``prompt`` tokens."""
        last = len(self.ranks) - 1
        done, sent = [0.0] * len(self.ranks), [0.0] * len(self.ranks)
        back: list[float] = []  # when each chunk has returned to the entry
        for pos in range(0, prompt, pace.chunk):
            rows = min(pace.chunk, prompt - pos)
            arrived = back[-pace.window] if len(back) >= pace.window else 0.0
            for at, rank in enumerate(self.ranks):
                done[at] = max(done[at], arrived) + rank.compute_s(rows, pos)
                rows_sent = rows if at < last else int(pos + rows == prompt)
                sent[at] = max(sent[at], done[at]) + self._transmit_s(at, rows_sent)
                arrived = sent[at] + rank.speed.latency_s
            back.append(arrived)
        return back[-1] + self.head_s

    def best_pace(self, prompt: int, others: int = 0, most: int = MAX_ROWS) -> PrefillPacing:
        """Choose the pace of a prompt of ``prompt`` tokens next to ``others`` other sessions.

        No chunk has more than ``most`` rows.
        """
        whole, simulated = min(prompt, most), min(prompt, _MAX_SIMULATED)
        limit_s = STALL_S if others else ALONE_STALL_S
        allowed = [
            size
            for size in (*(size for size in SIZES if size < whole), whole)
            if size <= min(MIN_ROWS, whole) or self._stall_s(prompt, size) <= limit_s
        ]
        times = {size: self.first_token_s(simulated, self.pace(size)) for size in allowed}
        near = _NEAR_BEST * min(times.values())
        return self.pace(max(size for size in allowed if times[size] <= near))

    def pace(self, chunk: int) -> PrefillPacing:
        """Return the pace with as many chunks in flight as keep the slowest rank or link busy."""
        busy = [rank.compute_s(chunk) for rank in self.ranks]
        busy += [self._transmit_s(at, chunk) for at in range(len(self.ranks))]
        trip = sum(busy) + sum(rank.speed.latency_s for rank in self.ranks)
        window = max(len(self.ranks), ceil(trip / max(busy) - _ROUNDING))
        return PrefillPacing(chunk=chunk, window=min(window, MAX_PENDING))

    def _stall_s(self, prompt: int, chunk: int) -> float:
        """Return the seconds of a chunk in the middle of a prompt on the slowest rank."""
        before = max(0, prompt - chunk) // 2
        return max(rank.compute_s(chunk, before) for rank in self.ranks)

    def _transmit_s(self, rank: int, rows: int) -> float:
        """Return the seconds that ``rows`` rows keep a link busy."""
        return self.message_bytes(rows) / self.ranks[rank].speed.bytes_per_s


def ring_times(plan: Plan, offers: Sequence[Offer], links: Links, shape: ModelSizes) -> RingTimes:
    """Build the cost model of a plan; the time of a layer is proportional to its weights.

    Raises:
        UserError: a node of the plan made no offer.
    """
    by_node = {offer.node: offer for offer in offers}
    nodes = [stage.node for stage in plan.stages]
    if missing := [node for node in nodes if node not in by_node]:
        raise UserError(f"Node `{short(missing[0])}` is in the plan but made no offer")
    pairs = list(zip(nodes, (*nodes[1:], nodes[0]), strict=True))
    speeds = [links.between(*pair) for pair in pairs] if len(pairs) > 1 else [LinkSpeed(0.0)]
    ranks = tuple(
        RankTimes(by_node[stage.node], _mean_layers(shape, stage.span), speed)
        for stage, speed in zip(plan.stages, speeds, strict=True)
    )
    row_bytes = shape.hidden_size * shape.itemsize
    return RingTimes(ranks, by_node[nodes[0]].head_s, row_bytes, _header_bytes())


def default_pace(prompt: int, ring: int, most: int = MAX_ROWS) -> PrefillPacing:
    """Choose the pace of a prompt on a ring without measured times.

    With M chunks on N equal ranks that each take a + b * rows for one, a prompt of T rows takes
    (M + N - 1) * (a + b * T / M), which is least where T / M is sqrt(T * a / (b * (N - 1))).
    """
    best = sqrt(prompt * _DEFAULT_START / (ring - 1)) if ring > 1 else inf
    chunk = max(size for size in SIZES if size <= max(best, SIZES[0]))
    return PrefillPacing(
        chunk=min(chunk, DEFAULT_MAX_ROWS, most, prompt), window=min(ring, MAX_PENDING)
    )


def _attention_s(table: Sequence[tuple[int, float]]) -> float:
    """Return the attention seconds of a row per row before it, in one layer."""
    if len(table) < 2:
        return 0.0
    (few, short), (many, long) = table[-2:]
    return max(0.0, 2 * (long / many - short / few) / (many - few))


def _extra_pairs(table: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the pairs of rows to add to the interpolation of `Offer.layer_seconds`."""
    few, many = table[-2:][0][0], table[-1][0]
    if rows <= few:
        return 0.0
    return (rows if rows > many else rows - few) * (rows - many) / 2


def _mean_layers(shape: ModelSizes, span: Span) -> float:
    return sum(shape.layer_bytes[span.start : span.stop]) * shape.layers / sum(shape.layer_bytes)


def _header_bytes() -> int:
    """Return the size of a Data message without its rows."""
    blob = Blob(DType.BFLOAT16, (), Digest(bytes(DIGEST_BYTES)), b"")
    return size(Data(SessionId(bytes(SESSION_ID_BYTES)), 0, 0, 0, 1, Flags(0), blob))
