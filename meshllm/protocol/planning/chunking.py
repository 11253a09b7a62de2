"""How long a prompt takes in chunks of so many rows, and which are best.

Theory of operation: the ranks of a ring work on different chunks of a prompt at once. Short chunks
are soon round the ring, long ones read the weights less often, so some sizes are tried against what
the ranks and the ways between them take, chunk by chunk and rank by rank. A row attends to all rows
before it, so a chunk takes the longer the later it stands: for each of them as much as the longest
entry of a cost table has more per row than the one before it.

On a rank, the steps of other sessions wait for the chunk that is computed. Where there are others,
one in the middle of the prompt takes `STALL_S` at most; where there are none, somebody may come,
who waits for `ALONE_STALL_S`. Below `LEAST_ROWS` the prompt would pay more than others gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

from meshllm.errors import UserError
from meshllm.names import DIGEST_BYTES, SESSION_ID_BYTES, Digest, SessionId, Span
from meshllm.protocol.planning.plan import Links, Offer, Plan, Shape, Wire
from meshllm.protocol.session.codec import MAX_ROWS, size
from meshllm.protocol.session.messages import Blob, Data, DType, Flags
from meshllm.protocol.session.pace import Pace
from meshllm.protocol.session.stage import MAX_PENDING

SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Rows that are tried, beside the whole prompt."""
STALL_S = 1.0  # of one chunk on one rank; others wait for a token meanwhile
ALONE_STALL_S = 4.0
COPY = 32  # rows; what stock attention copies for a chunk takes as long as they would
LEAST_ROWS = 128  # chunks half as long cost a prompt of 4096 tokens a sixth more
USUAL_MOST = 256  # rows where no time is known: 1 to 2 s of 28 layers of 1024 on one slow core

_ALIKE = 1.03  # times the least time: longer chunks mean fewer messages, and less that no table has
_LOOKED = 8192  # tokens of a prompt that are looked at: more change little, and take time to try
_ROUNDING = 0.01  # of a chunk
_USUAL_START = 72  # rows that take as long as reading the weights does: Qwen3-0.6B in bf16 on a CPU


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank takes for rows of a session."""

    offer: Offer
    layers: float
    """Those of its span, counted in mean layers of the model."""
    way: Wire
    """To the next rank."""

    def compute_s(self, rows: int, before: int = 0) -> float:
        """Seconds of its layers for ``rows`` rows, in sight of as many ``before`` them."""
        table = self.offer.layer_s
        pairs = (rows + COPY) * before + _bend(table, rows)
        return self.layers * (self.offer.layer_seconds(rows) + _pair_s(table) * pairs)


@dataclass(frozen=True, slots=True)
class RingTimes:
    """What the ranks of a plan take."""

    ranks: tuple[RankTimes, ...]
    head_s: float
    """Of the entry, for one row."""
    row_bytes: int
    """Of one row on a way."""
    header_bytes: int = 0
    """Of a message beside its rows."""

    def message_bytes(self, rows: int) -> int:
        """Count the bytes of so many rows on a way, or of none at all."""
        return rows * self.row_bytes + self.header_bytes

    def wire_s(self, rank: int, rows: int) -> float:
        """Seconds of so many rows from a rank to the next."""
        return self.ranks[rank].way.seconds(self.message_bytes(rows))

    def step_s(self, rows: int) -> float:
        """Seconds of one trip round the ring; the head takes more for more rows as a layer does."""
        first = self.ranks[0].offer
        head_s = self.head_s * first.layer_seconds(rows) / first.layer_seconds(1)
        ways = (self.wire_s(rank, rows) for rank in range(len(self.ranks)))
        return head_s + sum(rank.compute_s(rows) for rank in self.ranks) + sum(ways)

    def first_token_s(self, prompt: int, pace: Pace) -> float:
        """Seconds from a prompt of so many tokens to the first token of the answer."""
        last = len(self.ranks) - 1
        done, sent = [0.0] * len(self.ranks), [0.0] * len(self.ranks)
        back: list[float] = []  # when each chunk has been all round the ring
        for pos in range(0, prompt, pace.chunk):
            rows = min(pace.chunk, prompt - pos)
            arrived = back[-pace.window] if len(back) >= pace.window else 0.0
            for at, rank in enumerate(self.ranks):
                done[at] = max(done[at], arrived) + rank.compute_s(rows, pos)
                rows_sent = rows if at < last else int(pos + rows == prompt)
                sent[at] = max(sent[at], done[at]) + self._leave_s(at, rows_sent)
                arrived = sent[at] + rank.way.latency_s
            back.append(arrived)
        return back[-1] + self.head_s

    def best_pace(self, prompt: int, others: int = 0, most: int = MAX_ROWS) -> Pace:
        """Choose how a prompt of so many tokens goes round beside so many ``others``.

        No chunk has more than ``most`` rows.
        """
        whole, looked = min(prompt, most), min(prompt, _LOOKED)
        limit_s = STALL_S if others else ALONE_STALL_S
        polite = [
            size
            for size in (*(size for size in SIZES if size < whole), whole)
            if size <= min(LEAST_ROWS, whole) or self._stall_s(looked, size) <= limit_s
        ]
        times = {size: self.first_token_s(looked, self.pace(size)) for size in polite}
        near = _ALIKE * min(times.values())
        return self.pace(max(size for size in polite if times[size] <= near))

    def pace(self, chunk: int) -> Pace:
        """Let as many chunks be in flight as keep the slowest rank, or way, busy."""
        busy = [rank.compute_s(chunk) for rank in self.ranks]
        busy += [self._leave_s(at, chunk) for at in range(len(self.ranks))]
        trip = sum(busy) + sum(rank.way.latency_s for rank in self.ranks)
        window = max(len(self.ranks), ceil(trip / max(busy) - _ROUNDING))
        return Pace(chunk=chunk, window=min(window, MAX_PENDING))

    def _stall_s(self, prompt: int, chunk: int) -> float:
        """Seconds of a chunk in the middle of a prompt, on the rank that takes longest."""
        before = max(0, prompt - chunk) // 2
        return max(rank.compute_s(chunk, before) for rank in self.ranks)

    def _leave_s(self, rank: int, rows: int) -> float:
        """Seconds that so many rows keep a way busy."""
        return self.message_bytes(rows) / self.ranks[rank].way.bytes_per_s


def ring_times(plan: Plan, offers: Sequence[Offer], links: Links, shape: Shape) -> RingTimes:
    """Put together what offers and links say about a plan; layers take time as their weights do.

    Raises:
        UserError: a node of the plan made no offer.
    """
    by_node = {offer.node: offer for offer in offers}
    nodes = [stage.node for stage in plan.stages]
    if missing := [node for node in nodes if node not in by_node]:
        raise UserError(f"Node `{missing[0].hex()[:12]}` is in the plan and offers nothing")
    pairs = list(zip(nodes, (*nodes[1:], nodes[0]), strict=True))
    ways = [links.between(*pair) for pair in pairs] if len(pairs) > 1 else [Wire(0.0)]
    ranks = tuple(
        RankTimes(by_node[stage.node], _mean_layers(shape, stage.span), way)
        for stage, way in zip(plan.stages, ways, strict=True)
    )
    row_bytes = shape.hidden_size * shape.itemsize
    return RingTimes(ranks, by_node[nodes[0]].head_s, row_bytes, _header_bytes())


def usual_pace(prompt: int, ring: int, most: int = MAX_ROWS) -> Pace:
    """Choose how a prompt is fed to a ring where nobody measured how long rows take.

    With M chunks on N equal ranks that each take a + b * rows for one, a prompt of T rows takes
    (M + N - 1) * (a + b * T / M), which is least where T / M is sqrt(T * a / (b * (N - 1))).
    """
    best = sqrt(prompt * _USUAL_START / (ring - 1)) if ring > 1 else inf
    chunk = max(size for size in SIZES if size <= max(best, SIZES[0]))
    return Pace(chunk=min(chunk, USUAL_MOST, most, prompt), window=min(ring, MAX_PENDING))


def _pair_s(table: Sequence[tuple[int, float]]) -> float:
    """Seconds that a row takes for each row before it, in one layer."""
    if len(table) < 2:
        return 0.0
    (few, short), (many, long) = table[-2:]
    return max(0.0, 2 * (long / many - short / few) / (many - few))


def _bend(table: Sequence[tuple[int, float]], rows: int) -> float:
    """Count the pairs of rows that are not on the straight lines of `Offer.layer_seconds`."""
    few, many = table[-2:][0][0], table[-1][0]
    if rows <= few:
        return 0.0
    return (rows if rows > many else rows - few) * (rows - many) / 2


def _mean_layers(shape: Shape, span: Span) -> float:
    return sum(shape.layer_bytes[span.start : span.stop]) * shape.layers / sum(shape.layer_bytes)


def _header_bytes() -> int:
    """Count the bytes of a Data message beside its rows."""
    blob = Blob(DType.BFLOAT16, (), Digest(bytes(DIGEST_BYTES)), b"")
    return size(Data(SessionId(bytes(SESSION_ID_BYTES)), 0, 0, 0, 1, Flags(0), blob))
