"""What travels between ring neighbours.

Data messages go from rank to rank round the ring and come back to the entry with the hidden state
after the last layer. Everything else is small and rare.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto
from math import prod

from meshllm.names import Digest, NodeId, SessionId

PROTOCOL_VERSION = 2
"""The major version, and the first byte of every message; a node refuses any other. Within it,
messages, fields, records and names are added only, and skipped where they are not known."""

PROTOCOL_MINOR = 0
"""Counts what was added; only told, for people."""

MAX_RANKS = 256
"""Ranks of one ring: more hops than any model has layers to share."""

INT8_BLOCK = 32
"""Values of a row that share a scale, where they travel as 8-bit integers; the last block of a row
may be shorter."""

INT8_SCALE_BYTES = 2
"""Of a bfloat16."""

Buffer = bytes | bytearray | memoryview


class DType(IntEnum):
    """Element types, and how they travel; the number is the code on the wire."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    FLOAT32_INT8 = 4
    """8-bit integers, with a scale for each block of a row; they become the type before it."""
    BFLOAT16_INT8 = 5
    FLOAT16_INT8 = 6
    FLOAT32_PACKED = 7
    """The same values in fewer bytes: one byte of each is deflated, the others are as they were."""
    BFLOAT16_PACKED = 8
    FLOAT16_PACKED = 9

    def sizes(self, shape: tuple[int, ...]) -> range:
        """Tell how many bytes a tensor may have; the last dimension of ``shape`` is a row's."""
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
    """What the entry wants of a Data message; bits that are not known go on to the next rank."""

    PREFILL = auto()
    """The rows are a chunk of the prompt."""
    NEED_ROW = auto()
    """Rows are to come back: the last one of a chunk, each of a decode step; else none does."""
    HELP = auto()
    """The last rank may send its part of the logits, too, behind the row of a step of one."""


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
    """The first message in each direction of a link: who speaks, and for which plan."""

    node: NodeId
    epoch: int
    plan: Digest


@dataclass(frozen=True, slots=True)
class Beat:
    """I am here; ``echo`` returns the ``stamp`` of the last beat heard, for the round trip."""

    stamp: int
    """Microseconds on the sender's clock."""
    echo: int
    """The other side's last stamp, or 0."""
    held: int
    """Microseconds between hearing that stamp and sending this beat."""


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
    """``[1, rows, D]`` from rank to rank; what comes back to the entry is ``[1, 1, D]`` for a chunk
    with NEED_ROW, None for one without."""


@dataclass(frozen=True, slots=True)
class Logits:
    """The last rank's part of the logits of the row at ``pos``, right behind that row.

    Nothing is owed: an entry that has to wait too long computes them itself.
    """

    session: SessionId
    epoch: int
    gen: int
    pos: int
    blob: Blob
    """``[1, blocks, outputs of a block]``."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A session begins behind the first ``length`` positions that are kept of another one.

    Goes ahead of its first Data; a rank that lacks the ``base`` answers that Data with a Gap.
    """

    session: SessionId
    epoch: int
    base: SessionId
    length: int
    whole: bool
    """Nobody else will want the base: no copy of it has to be made."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A rank was asked to write at a position that it has not reached; goes on to the entry."""

    session: SessionId
    epoch: int
    gen: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Results below ``gen`` are not wanted any more; out of band, may be lost."""

    session: SessionId
    epoch: int
    gen: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of jobs on one rank went, in microseconds."""

    compute_us: int
    """In the model."""
    serialise_us: int
    """Between bytes and tensors, the keyed hash included."""
    queue_us: int
    """From the arrival of a message to the start of its job on the compute thread."""

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.compute_us + other.compute_us,
            self.serialise_us + other.serialise_us,
            self.queue_us + other.queue_us,
        )

    @property
    def total_us(self) -> int:
        """All of it: the parts do not overlap."""
        return self.compute_us + self.serialise_us + self.queue_us


@dataclass(frozen=True, slots=True)
class Tally:
    """What one rank did for a session."""

    spent: Spent
    """On decode steps."""
    steps: int
    """Decode steps counted in ``spent``."""
    bytes_sent: int
    """Bytes of those steps that left for the next rank."""
    round_trip_us: int
    """Round trip of the link to the next rank; 0 when not measured."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the session; each rank appends its tally, and the message ends at the entry."""

    session: SessionId
    epoch: int
    keep: int = 0
    """Positions that others may go on from, where there is room to keep them; the rest is freed."""
    tallies: tuple[Tally, ...] = ()
    """The tallies of rank 1, 2, and so on."""


class FaultCode(IntEnum):
    """Why a session cannot go on."""

    OTHER = 0
    """For a reason of a later version."""
    BUSY = 1
    """No room for another session's cache."""
    INTEGRITY = 2
    """A blob is not what its hash says."""
    MODEL = 3
    """The model raised."""
    EPOCH = 4
    """The rank serves another epoch."""
    RULES = 5
    """A rank sent what the rules forbid."""
    LOST = 6
    """A neighbour is gone."""
    TIMED_OUT = 7
    """Nothing came back in time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank gave up on a session; goes on to the entry, which ends it with a typed error."""

    session: SessionId
    epoch: int
    code: FaultCode
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A message of a later version, which proves that its sender is there, and nothing else."""

    kind: int
    body: bytes


SessionMessage = Data | Logits | Resume | Gap | Cancel | Close | Fault
"""What goes from rank to rank, round the ring."""

Message = Hello | Beat | SessionMessage | Unknown


@dataclass(frozen=True, slots=True)
class Forward:
    """An action of every rank: send this to the next one."""

    message: SessionMessage

    @property
    def control(self) -> bool:
        """Whether it may overtake waiting Data; everything without rows may."""
        return not isinstance(self.message, Data | Logits)
