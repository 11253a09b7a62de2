"""Messages between ring neighbours.

Data messages go from rank to rank round the ring and come back to the entry with the hidden state
after the last layer. All others are small and rare.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto
from math import prod

from meshllm.names import FIRST_GROUP, Digest, GroupId, NodeId, SessionId, Span

PROTOCOL_VERSION = 3
"""The major version, and the first byte of every message; a node rejects any other. Within it,
messages, fields, records and names are only added, and unknown ones are skipped."""

PROTOCOL_MINOR = 0
"""Counts additions within the major version; for people only."""

MAX_RANKS = 256
"""Ranks of one ring: more than any model has layers."""

INT8_BLOCK = 32
"""Values of a row that share a scale when they are sent as int8; the last block of a row may be
shorter."""

INT8_SCALE_BYTES = 2
"""The scale is a bfloat16."""

Buffer = bytes | bytearray | memoryview


class DType(IntEnum):
    """Element types and their encodings; the number is the code on the wire."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    FLOAT32_INT8 = 4
    """Quantised to int8, with a scale per block of a row; decoded to the type named first."""
    BFLOAT16_INT8 = 5
    FLOAT16_INT8 = 6
    FLOAT32_PACKED = 7
    """Lossless compression: one byte of each value is deflated, the others are unchanged."""
    BFLOAT16_PACKED = 8
    FLOAT16_PACKED = 9

    def sizes(self, shape: tuple[int, ...]) -> range:
        """Return the possible sizes in bytes of a tensor; the last dimension is that of a row."""
        count = prod(shape)
        match self:
            case DType.FLOAT32_INT8 | DType.BFLOAT16_INT8 | DType.FLOAT16_INT8:
                scales = count // shape[-1] * -(-shape[-1] // INT8_BLOCK)
                size = count + scales * INT8_SCALE_BYTES
            case DType.FLOAT32 | DType.FLOAT32_PACKED:
                size = 4 * count
            case _:
                size = 2 * count
        if self >= DType.FLOAT32_PACKED:
            return range(size - count + 1, size)
        return range(size, size + 1)


class Flags(IntFlag):
    """What the entry requests with a Data message; unknown bits are passed on."""

    PREFILL = auto()
    """The rows are a chunk of the prompt."""
    NEED_ROW = auto()
    """Return rows to the entry: the last one of a chunk, all of a decode step; else none."""
    HELP = auto()
    """The last rank may also send its part of the logits, after the row of a step of one row."""
    RECOMPUTE = auto()
    """Compute the rows only in the layers that a `Resume` calls lost. Ranks whose last layer is
    followed by a lost one send the rows that they recorded, the others send none."""
    COMMITTED = auto()
    """Nothing is in flight before this step: the rows before it have been all round the ring."""
    NO_HANDOVER = auto()
    """Never hand the caches of the session over: only some nodes may see it, and the stages do not
    know which. All Data of such a session have it."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A tensor as bytes: C order, little endian."""

    dtype: DType
    shape: tuple[int, ...]
    digest: Digest
    """blake3 of header and payload under the session's key."""
    payload: Buffer


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message in each direction of a link: the sender and its plan."""

    node: NodeId
    epoch: int
    plan: Digest
    group: GroupId = FIRST_GROUP
    """The ring of the plan; a node may be linked to another one in several rings."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Keep-alive; ``echo`` returns the ``stamp`` of the last beat received, for the round trip."""

    stamp: int
    """Microseconds on the sender's clock."""
    echo: int
    """The other side's last stamp, or 0."""
    held: int
    """Microseconds between receiving that stamp and sending this beat."""


@dataclass(frozen=True, slots=True)
class Data:
    """Rows of hidden state at positions ``[pos, pos + rows)`` of a session."""

    session: SessionId
    epoch: int
    gen: int
    pos: int
    rows: int
    flags: Flags
    blob: Blob | None
    """``[1, rows, D]`` from rank to rank; back to the entry, ``[1, 1, D]`` for a chunk with
    NEED_ROW, None for one without. None with RECOMPUTE if the next rank lacks none of the rows."""

    @property
    def is_decoded(self) -> bool:
        """Whether these are the rows of a decode step."""
        return not (Flags.PREFILL in self.flags or Flags.RECOMPUTE in self.flags)


@dataclass(frozen=True, slots=True)
class Logits:
    """The last rank's part of the logits of the row at ``pos``, sent right after that row.

    They are optional: an entry that has to wait too long computes them itself.
    """

    session: SessionId
    epoch: int
    gen: int
    pos: int
    blob: Blob
    """``[1, blocks, outputs of a block]``."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Start a session with the first ``length`` positions of a kept one.

    Precedes its first Data; a rank that lacks the ``base`` answers that Data with a Gap.
    """

    session: SessionId
    epoch: int
    base: SessionId
    length: int
    whole: bool
    """Take over the cache of the base instead of copying it: no other session will want it."""
    lost: tuple[Span, ...] = ()
    """Layers whose caches are lost, as they were on another node; Data with `Flags.RECOMPUTE`
    follow."""
    held: int = 0
    """Positions that the lost layers hold nevertheless. Each rank lowers it to what its own hold,
    and the entry, which gets it back, recomputes from there on."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The rows of a Data message start beyond the cache of a rank; passed on to the entry."""

    session: SessionId
    epoch: int
    gen: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Results below ``gen`` are no longer wanted; out of band, may be lost."""

    session: SessionId
    epoch: int
    gen: int


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Time spent by jobs on one rank, in microseconds."""

    compute_us: int
    """In the model."""
    serialise_us: int
    """Between bytes and tensors, the keyed hash included."""
    queue_us: int
    """From the arrival of a message to the start of its job on the compute thread."""

    def __add__(self, other: "JobTimes") -> "JobTimes":
        return JobTimes(
            self.compute_us + other.compute_us,
            self.serialise_us + other.serialise_us,
            self.queue_us + other.queue_us,
        )

    @property
    def total_us(self) -> int:
        """The sum: the parts do not overlap."""
        return self.compute_us + self.serialise_us + self.queue_us


@dataclass(frozen=True, slots=True)
class RankStats:
    """Work of one rank for a session."""

    spent: JobTimes
    """On decode steps."""
    steps: int
    """Decode steps counted in ``spent``."""
    bytes_sent: int
    """Bytes of those steps that were sent to the next rank."""
    round_trip_us: int
    """Round trip of the link to the next rank; 0 when not measured."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the session; each rank appends its tally, and the message ends at the entry."""

    session: SessionId
    epoch: int
    keep: int = 0
    """Positions to keep for other sessions, if there is room; the rest is freed."""
    tallies: tuple[RankStats, ...] = ()
    """The tallies of rank 1, 2, and so on."""
    is_own: bool = False
    """The session is one of the owner of the entry: those of others do not push it out."""


class FaultCode(IntEnum):
    """Why a session cannot continue."""

    OTHER = 0
    """A reason of a later version."""
    BUSY = 1
    """No room for another session's cache."""
    INTEGRITY = 2
    """A blob does not match its hash."""
    MODEL = 3
    """The model raised, or takes fewer positions."""
    EPOCH = 4
    """The rank serves another epoch."""
    RULES = 5
    """A rank broke the protocol."""
    LOST = 6
    """A neighbour is gone."""
    TIMED_OUT = 7
    """Nothing came back in time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank ended a session; passed on to the entry, which raises a typed error."""

    session: SessionId
    epoch: int
    code: FaultCode
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class KvOffer:
    """The first message of a link by which a leaving node hands over KV caches.

    The next owner of its layers answers with its own, when it can take some. The leaving node sends
    another one after the last `KvRows`, and gets another answer when all before it were taken.
    """

    node: NodeId
    epoch: int
    plan: Digest
    """The plan by which the layers move."""
    group: GroupId = FIRST_GROUP


@dataclass(frozen=True, slots=True)
class KvRows:
    """Rows of the KV cache of a session in one layer, for the next owner of the layer."""

    session: SessionId
    layer: int
    pos: int
    """Position of the first row."""
    split: int
    """Where the values begin in the last dimension; 0 if these are hidden states that entered the
    layer, which its next owner sends again if the layer is lost."""
    blob: Blob
    """``[1, H, rows, D]``: keys and values side by side."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.blob.shape[2]


@dataclass(frozen=True, slots=True)
class UnknownRingMessage:
    """A message of a later version, which only proves that its sender is alive."""

    kind: int
    body: bytes


SessionMessage = Data | Logits | Resume | Gap | Cancel | Close | Fault
"""Messages that go from rank to rank, round the ring."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """What is known of a session's message whose content is invalid; it is never sent.

    The session ends, and others go on: its previous rank may have a bug, or a later version.
    """

    session: SessionId
    epoch: int
    text: str
    """What is invalid."""
    is_close: bool = False
    """The message was a `Close`, which the following ranks still need."""


Delivered = SessionMessage | Malformed
"""What a link delivers to the entry or the stage of a rank."""

Message = Hello | Heartbeat | SessionMessage | KvOffer | KvRows | UnknownRingMessage


@dataclass(frozen=True, slots=True)
class Forward:
    """Action of any rank: send this to the next one."""

    message: SessionMessage

    @property
    def control(self) -> bool:
        """Whether it may overtake queued Data, as what neither has rows nor tells where they go."""
        return not isinstance(self.message, Data | Logits | Resume)
