"""What a node reports of itself, its ring and its mesh, as values and as JSON.

`/mesh/*` sends it, the command line and the metrics read it. A field may be added without another
`SCHEMA` when it has a default: a reader ignores fields that it does not know, and takes an unknown
state for the first one.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from meshllm.errors import PeerFault, UserError
from meshllm.names import Span
from meshllm.strict_json import build, lay_out

T = TypeVar("T")

SCHEMA = 1
"""Version of the JSON; another one where a field goes or changes its meaning."""


class RingState(StrEnum):
    """How far the ring is."""

    WAITING = "waiting"
    """There is no plan."""
    FORMING = "forming"
    SERVING = "serving"


class NodeState(StrEnum):
    """What a node of the mesh does."""

    STANDBY = "standby"
    LOADING = "loading"
    SERVING = "serving"
    JOINING = "joining"
    DOWN = "down"
    LEFT = "left"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The model of the mesh."""

    name: str
    layers: int
    hidden_size: int
    dtype: str
    quant: str
    """How the weights are held: `none` is as stored."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A rank of the ring and the layers it holds."""

    rank: int
    node: str
    name: str
    layers: Span
    room_tokens: int | None = None
    """Tokens of all sessions for which it has memory; None where it did not tell."""


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """What one rank should take of a token."""

    rank: int
    compute_ms: float
    wire_ms: float
    """Time to the next rank."""


@dataclass(frozen=True, slots=True)
class Planned:
    """How fast the ring should be, from what its nodes measured alone."""

    ms_per_token: float
    ttft_ms: float
    """Time to the first token."""
    head_ms: float
    hops: tuple[PlannedTimes, ...]


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """What one rank took of a token of the latest answer; the mean of those after the first."""

    rank: int
    node: str
    layers: Span
    compute_ms: float
    serialise_ms: float
    """Time between bytes and tensors."""
    queue_ms: float
    """Time in wait for the compute thread."""
    wire_ms: float
    """Time to the next rank."""
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Measured:
    """How fast the latest answer was."""

    ms_per_token: float
    ttft_ms: float
    """Time to the first token."""
    tokens: int
    hops: tuple[MeasuredTimes, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A node, and what people call it."""

    node: str
    name: str


@dataclass(frozen=True, slots=True)
class Unplaced(Named):
    """A node without a stage."""

    reason: str


@dataclass(frozen=True, slots=True)
class RingStatus:
    """The ring: who holds what, and how fast that is."""

    state: RingState
    reason: str
    """Why it does not serve; of a plan, why it is this one."""
    epoch: int
    digest: str
    """The first 12 hexadecimal digits of the plan's digest; empty without a plan."""
    policy: str
    entry: str | None
    stages: tuple[StageStatus, ...]
    predicted: Planned | None
    measured: Measured | None
    advice: str
    """What would make it faster; may be empty."""
    standbys: tuple[Unplaced, ...] = ()
    refused: tuple[Unplaced, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The link from the node that reports to another."""

    round_trip_ms: float | None
    """None until it was measured."""
    path: str
    path_reason: str
    """Why it is that path; may be empty."""
    address: str
    bytes_sent: int
    bytes_received: int
    heard_s: float
    """Seconds since the other was heard."""
    clock_s: float | None
    """By how much the other's clock is ahead; None where it did not tell the time."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of the mesh, as the node that reports knows it."""

    node: str
    short: str
    name: str
    role: str
    state: NodeState
    reason: str
    addresses: tuple[str, ...]
    memory_bytes: int
    """What it offers."""
    layers: Span | None
    rank: int | None
    is_self: bool = field(metadata={"json": "self"})
    """It is the one that reports."""
    incarnation: int
    version: str
    link: LinkStatus | None
    execution: str = ""
    """How its engine runs, and why; empty where that is not known."""


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """What became of requests that were made at this node."""

    active: int
    waiting: int
    served: int
    failed: int
    tokens: int
    """Of all answers."""


@dataclass(frozen=True, slots=True)
class NetworkStatus:
    """What a transport found out about the networks around the node."""

    nat: str
    line: str
    """The kind of NAT in one line for people."""
    observed: tuple[str, ...]
    """The addresses under which others see this node."""
    relays: tuple[tuple[str, str], ...]
    """Each relay, and the state of the registration with it."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """What the process of a node holds in memory, in bytes."""

    process: int = 0
    """Resident, as the system counts it."""
    weights: int = 0
    kv_cache: int = 0
    """Reserved by sessions that run."""
    prefix_cache: int = 0
    """Held for prompts that begin alike."""
    kv_room: int = 0
    """For the last two, at most."""
    drafter: int = 0
    """Texts in which guesses are looked up."""
    recorded_steps: int = 0
    """Working memory of steps that are replayed."""


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """All that a node reports: `/mesh/status`."""

    mesh: str
    node: str
    name: str
    version: str
    model: ModelStatus | None
    ring: RingStatus
    nodes: tuple[NodeStatus, ...]
    """Those of the mesh, the one that reports first."""
    sessions: SessionCounts
    listening: tuple[str, ...]
    networks: tuple[NetworkStatus, ...]
    since_s: float
    """Seconds that the node runs."""
    memory: MemoryStatus = MemoryStatus()
    warnings: tuple[str, ...] = ()
    """What its owner should look after."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One that may take part in the mesh, or may no more."""

    node: str
    short: str
    name: str
    role: str
    """Empty of a removed one."""
    state: str
    """What a node does, `linked` of a client that is here, or `removed`."""
    is_self: bool = field(metadata={"json": "self"})
    hosts: tuple[str, ...]
    """Those by whose word it is here: the founder first, the one that let it in last."""


@dataclass(frozen=True, slots=True)
class Members:
    """Who may take part: `/mesh/members`."""

    members: tuple[MemberStatus, ...]


@dataclass(frozen=True, slots=True)
class Invitation:
    """A new ticket: `/mesh/ticket`."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Removed(Named):
    """A member that was removed: `/mesh/remove`."""

    spared: tuple[Named, ...]
    """Those it let in, which stay."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something may have changed: a line of `/mesh/events`."""

    event: str
    ring: RingState
    epoch: int
    digest: str
    nodes: dict[str, NodeState]
    """What each node does, by its id."""


def to_json(value: object) -> dict[str, Any]:
    """Lay one of these out as a JSON object; its sender adds the `SCHEMA`."""
    fields: dict[str, Any] = lay_out(value)
    return fields


def from_json(kind: type[T], found: object) -> T:
    """Read what `to_json` made, here or in a later version of the same schema.

    Raises:
        PeerFault: a field is missing or of a wrong type, or the schema is another.
    """
    schema = found.get("schema", SCHEMA) if isinstance(found, dict) else SCHEMA
    if schema != SCHEMA:
        raise PeerFault(
            f"The node answers in schema {schema}, and this command reads {SCHEMA}",
            hint="use the same version of meshllm as the node",
        )
    try:
        return build(kind, found, strict=False)
    except UserError as error:
        raise PeerFault(f"The node's answer cannot be read: {error}") from None
