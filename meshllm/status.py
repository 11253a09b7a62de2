"""The status that a node reports of itself, its ring and its mesh, as dataclasses and as JSON.

`/mesh/*` sends it; the command line and the metrics read it. A field with a default may be added
without a new `SCHEMA`: a reader ignores unknown fields and reads an unknown state as the first
member of its enumeration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from meshllm.errors import PeerFault, UserError
from meshllm.names import LossCause, Span, counted
from meshllm.strict_json import build, lay_out

T = TypeVar("T")

MIN_PREFIX = 6  # hexadecimal digits of a key that name its model
NO_LINK = "no link to it"  # why a node is down; one whose engine is down has another reason
UNANSWERED_HINT = (
    "they are off or unreachable, or this node was removed from the mesh: ask a member;"
    " to join again use a new ticket and another `--state`"
)
SCHEMA = 1
"""Version of the JSON; incremented when a field is removed or changes its meaning."""


class RingState(StrEnum):
    """The state of the ring."""

    WAITING = "waiting"
    """No plan yet."""
    FORMING = "forming"
    SERVING = "serving"


class NodeState(StrEnum):
    """The state of a node of the mesh."""

    STANDBY = "standby"
    LOADING = "loading"
    SERVING = "serving"
    JOINING = "joining"
    DOWN = "down"
    LEAVING = "leaving"
    LEFT = "left"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ProviderOffer:
    """What a provider says of a model that its engine serves."""

    provider: str
    """Name of the node."""
    precision: str = ""
    """Empty if unknown."""
    context: int = 0
    """Maximum tokens of a prompt and its answer; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model of the mesh."""

    name: str
    layers: int
    hidden_size: int
    dtype: str
    quant: str
    """Quantisation of the weights; `none` is as stored."""
    context: int = 0
    """Maximum tokens of a prompt and its answer; of several providers, the fewest."""
    fingerprint: str = ""
    """Identifies weights, data type and quantisation; empty if unknown."""
    providers: tuple[str, ...] = ()
    """Names of the nodes that provide it with an engine of their own; empty for the ring's."""
    precision: str = ""
    """What all of its providers say of it; empty if they differ, or if it is unknown."""
    aliases: tuple[str, ...] = ()
    """Other names that a request may give."""
    key: str = ""
    """Identifies it in this mesh: 16 hexadecimal digits, a prefix of which is a name too."""
    replicas: int = 0
    """Rings that are wanted; 0 for a model of providers."""
    epoch: int = 0
    """Of the ring that serves it; 0 if none does."""
    is_exact: bool = field(default=False, metadata={"json": "exact"})
    """Whether a ring serves it whose nodes all compute bit-identically to transformers."""
    rings: int = 0
    """Rings that serve it now."""
    offers: tuple[ProviderOffer, ...] = ()
    """Those of `providers`, in the same order; empty if there are too many to list, or an earlier
    version reports."""
    beside: tuple[ProviderOffer, ...] = ()
    """Of a model of rings: those of providers of its name, which answer what needs more than the
    rings have, and new requests while no ring serves; empty if there are too many to list."""
    shared: str = ""
    """The name that it shares with other quantisations, if `name` is another one."""

    @property
    def is_served(self) -> bool:
        """Whether a ring or a provider answers requests for it now."""
        return bool(self.rings or self.providers or self.beside)

    @property
    def is_uniform(self) -> bool:
        """Whether all that serve it are alike: rings without providers, or one provider."""
        return len(self.providers) == 1 or not (self.providers or self.beside)

    @property
    def weight_precision(self) -> str:
        """The precision of the weights, after quantisation; empty if unknown."""
        if self.providers:
            return self.precision
        return self.dtype if self.quant in {"", "none"} else self.quant

    @property
    def shared_name(self) -> str:
        """The name that it shares with its other quantisations."""
        return self.shared or self.name

    @property
    def precise_name(self) -> str:
        """The name that means its rings alone, whatever other quantisations there are."""
        is_of_rings = self.key and self.weight_precision
        return f"{self.shared_name}@{self.weight_precision}" if is_of_rings else self.name


@dataclass(frozen=True, slots=True)
class Models:
    """The models that a node serves: `/mesh/models`."""

    models: tuple[ModelStatus, ...]


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A rank of the ring and its layers."""

    rank: int
    node: str
    name: str
    layers: Span
    room_tokens: int | None = None
    """KV cache capacity in tokens, over all sessions; None if unknown."""


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """Predicted times of one rank per token."""

    rank: int
    compute_ms: float
    wire_ms: float
    """Time to the next rank."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Predicted speed of the ring, from the measurements of its nodes."""

    ms_per_token: float
    ttft_ms: float
    """Time to the first token."""
    head_ms: float
    hops: tuple[PlannedTimes, ...]

    @property
    def hops_with_head(self) -> tuple[PlannedTimes, ...]:
        """The hops, with the LM head in the time of the entry, as measured times have it."""
        return tuple(
            hop if hop.rank else replace(hop, compute_ms=hop.compute_ms + self.head_ms)
            for hop in self.hops
        )


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Measured times of one rank in the latest answer: means per token after the first."""

    rank: int
    node: str
    layers: Span
    compute_ms: float
    serialise_ms: float
    """Time to convert between bytes and tensors."""
    queue_ms: float
    """Time waiting for the compute thread."""
    wire_ms: float
    """Time to the next rank."""
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Speed of the latest answer."""

    ms_per_token: float
    ttft_ms: float
    """Time to the first token."""
    tokens: int
    hops: tuple[MeasuredTimes, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A node id and the node's name."""

    node: str
    name: str


@dataclass(frozen=True, slots=True)
class Unplaced(Named):
    """A node without a span, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PastState:
    """A state of the reporting node in the ring."""

    state: str
    """`loading`, `waiting` for the others, `dialing`, `half` linked, `open`, or `backoff`."""
    ago_s: float
    """Since when, in seconds before the report."""


@dataclass(frozen=True, slots=True)
class RingStatus:
    """The ring: the span of each rank, and its speed."""

    state: RingState
    reason: str
    """Why it does not serve."""
    epoch: int
    digest: str
    """The first 12 hexadecimal digits of the plan's digest; empty without a plan."""
    policy: str
    entry: str | None
    stages: tuple[StageStatus, ...]
    predicted: Planned | None
    measured: Measured | None
    advice: str
    """A change that would make the ring faster; may be empty."""
    standbys: tuple[Unplaced, ...] = ()
    refused: tuple[Unplaced, ...] = ()
    history: tuple[PastState, ...] = ()
    """The latest states of the reporting node, oldest first."""
    members: int | None = None
    """Nodes that `--members` requests."""
    exclude: tuple[str, ...] = ()
    """Ids of nodes that hold no layers."""
    execution: str = ""
    """How the reporting node computes its layers; as in `NodeStatus`."""


@dataclass(frozen=True, slots=True)
class ServedRing:
    """One of the rings of a mesh: a replica of a model."""

    model: str
    replica: int
    """From 0."""
    state: RingState
    reason: str
    """What it waits for; empty while it serves."""
    is_own: bool = field(metadata={"json": "own"})
    """Whether the reporting node takes part in it."""
    epoch: int
    entry: str | None
    stages: tuple[StageStatus, ...]
    standbys: tuple[Named, ...] = ()
    """Nodes that take part without layers."""
    lacks_bytes: int = 0
    """Memory of further nodes that it needs."""
    status: RingStatus | None = None
    """All that the reporting node knows of it; None if it takes no part in it."""


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """Terms of the mesh to try out: the body of `POST /mesh/plan`; null is what is in force."""

    policy: str | None = None
    members: int | None = None
    """Nodes of the ring; 0 lets the policy choose."""
    exclude: tuple[str, ...] | None = None
    """Ids of nodes that hold no layers."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """By the id of a node: instead of what it offers."""


@dataclass(frozen=True, slots=True)
class PlannedRing:
    """The ring that other terms would give: the reply of `POST /mesh/plan`."""

    policy: str
    reason: str
    """Why there is none; empty if there is one."""
    stages: tuple[StageStatus, ...]
    predicted: Planned | None
    standbys: tuple[Unplaced, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The link from the reporting node to another."""

    round_trip_ms: float | None
    """None until measured."""
    path: str
    path_reason: str
    """Why this path is used; may be empty."""
    address: str
    bytes_sent: int
    bytes_received: int
    heard_s: float
    """Seconds since the last message from the peer."""
    clock_s: float | None
    """Offset of the peer's clock, positive if ahead; None if unknown."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured times of a node for one model."""

    model: str
    """Its name, without the precision."""
    layer_ms: tuple[tuple[int, float], ...]
    """Numbers of rows, and milliseconds of one mean layer for them."""
    head_ms: float
    """Of the final norm and head for one row."""
    quant: str = ""
    """Quantisation of its weights; empty if an earlier version reports."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of the mesh, as known to the reporting node."""

    node: str
    short: str
    name: str
    role: str
    state: NodeState
    reason: str
    addresses: tuple[str, ...]
    memory_bytes: int
    """Offered to the ring."""
    layers: Span | None
    rank: int | None
    is_self: bool = field(metadata={"json": "self"})
    """Whether it is the reporting node."""
    incarnation: int
    version: str
    link: LinkStatus | None
    execution: str = ""
    """The execution mode of its model, and why, or which layers a node without a rank has loaded in
    advance; empty if unknown."""
    costs: CostTable | None = None
    """None until measured."""


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Losses of a ring with one cause that answers survived, and what they cost."""

    cause: LossCause
    count: int = 0
    paused_s: float = 0.0
    """Seconds from these losses to the next text, in total."""
    tokens: int = 0
    """Tokens shown by then: the next rings were given them, and generated none of them."""
    rows: int = 0
    """Rows that this node computed again after such losses, of any answers, times the layers."""


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """Counts of the requests received by this node."""

    active: int
    waiting: int
    served: int
    failed: int
    tokens: int
    """Generated, over all answers."""
    losses: tuple[LossCounts, ...] = ()
    """Losses of a ring that an answer survived, by cause."""
    recomputed: int = 0
    """Rows that were computed again after losses, times the layers that computed them. The entry
    counts for all nodes where that was every layer."""


@dataclass(frozen=True, slots=True)
class NetworkStatus:
    """What a transport detected about the node's network."""

    nat: str
    line: str
    """The kind of NAT, described in one line."""
    observed: tuple[str, ...]
    """The external addresses of this node as seen by peers."""
    relays: tuple[tuple[str, str], ...]
    """Each relay, and the state of this node's registration."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Memory use of the node's process, in bytes.

    All but `process`, `unread_weights`, `kv_room` and `waiting_room` are parts, which together take
    `process` and `unread_weights`: `other` is the rest. Caches count as reserved and a draft model
    as a whole, so that the parts may be more. Weights and caches on a GPU are not in the memory of
    the process.
    """

    process: int = 0
    """Resident set size."""
    weights: int = 0
    """As stored, of all loaded layers, also of those loaded in advance; mapped from their file if
    they have its dtype. Without those that quantised ones replace."""
    packed_weights: int = 0
    """Quantised matrices, which may be mapped from their cache, and copies in oneDNN's layout."""
    unread_weights: int = 0
    """Of both, what is not in memory: mapped and not read yet, such as rows of an embedding, or
    reclaimed."""
    kv_cache: int = 0
    """Reserved by running sessions."""
    prefix_cache: int = 0
    """Cached prompt prefixes."""
    kv_room: int = 0
    """Limit of `kv_cache` and `prefix_cache` together."""
    drafter: int = 0
    """Index of past texts for speculative decoding, or the draft model and its caches."""
    recorded_steps: int = 0
    """Arenas of traced steps."""
    sent_rows: int = 0
    """Hidden states sent to the next rank, from which the caches of a lost one are computed."""
    waiting_rows: int = 0
    """Hidden states that wait for a step of this rank, or to be sent."""
    waiting_room: int = 0
    """Limit of `waiting_rows`."""
    received_caches: int = 0
    """KV caches that other nodes hand over, for layers loaded in advance."""
    requests: int = 0
    """Prompts of the requests in progress."""
    other: int = 0
    """The rest of the process: the interpreter, libraries, workspace, connections."""


PASSING_MEMORY = (
    "process",
    "unread_weights",
    "waiting_rows",
    "received_caches",
    "requests",
    "other",
)
"""Fields of `MemoryStatus` that change all the time: that alone is not an event."""


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """The whole status of a node: `/mesh/status`."""

    mesh: str
    node: str
    name: str
    version: str
    model: ModelStatus | None
    ring: RingStatus
    nodes: tuple[NodeStatus, ...]
    """All nodes of the mesh, the reporting node first."""
    sessions: SessionCounts
    listening: tuple[str, ...]
    networks: tuple[NetworkStatus, ...]
    since_s: float
    """Uptime of the node in seconds."""
    memory: MemoryStatus = MemoryStatus()
    warnings: tuple[str, ...] = ()
    """Conditions that need the owner's attention."""
    provided: tuple[ModelStatus, ...] = ()
    """Models of nodes with an engine of their own."""
    rings: tuple[ServedRing, ...] = ()
    """Every ring of the mesh, the reporting node's included."""
    models: tuple[ModelStatus, ...] = ()
    """The models of these rings, the first of the mesh first; `model` is that of the own ring."""
    is_client: bool = field(default=False, metadata={"json": "client"})
    """Whether a client of the mesh reports, which knows its models only."""
    unanswered: int = 0
    """Members that have not left, if this node is linked to none of them. It does not tell being
    removed while it was down from their being down: nobody answers a removed node."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A present or removed member of the mesh."""

    node: str
    short: str
    name: str
    role: str
    """Empty for a removed member."""
    state: str
    """A `NodeState`, `linked` for a connected client, or `removed`."""
    is_self: bool = field(metadata={"json": "self"})
    inviters: tuple[str, ...]
    """The chain of inviters: the founder first, the direct inviter last."""


@dataclass(frozen=True, slots=True)
class Members:
    """The members of the mesh: `/mesh/members`."""

    members: tuple[MemberStatus, ...]


@dataclass(frozen=True, slots=True)
class NewTicket:
    """A new ticket: `/mesh/ticket`."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The model that the mesh no longer serves: `DELETE /mesh/models`."""

    model: str
    """As it was named, or with its precision if another quantisation is still served."""


@dataclass(frozen=True, slots=True)
class LayerSpans:
    """How the layers of a model are split now, for training: `/mesh/layers`."""

    spans: tuple[str, ...]
    """In order, such as `0:14`."""


@dataclass(frozen=True, slots=True)
class RevokedKeys:
    """The tags of all API keys that the owner revoked, in hexadecimal: `/mesh/revoked`."""

    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removed(Named):
    """The removed member: `/mesh/remove`."""

    spared: tuple[Named, ...]
    """Members it had invited, which stay."""
    taken: tuple[Named, ...] = ()
    """Members it had invited, which are removed with it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A possible change of state: a line of `/mesh/events`."""

    event: str
    ring: RingState
    epoch: int
    digest: str
    nodes: dict[str, NodeState]
    """The state of each node, by id."""


def of_providers(name: str, offers: Sequence[ProviderOffer]) -> ModelStatus:
    """Return a model as its providers serve it; there is at least one."""
    precisions = {each.precision for each in offers}
    return ModelStatus(
        name,
        layers=0,
        hidden_size=0,
        dtype="",
        quant="",
        context=min((each.context for each in offers if each.context), default=0),
        providers=tuple(each.provider for each in offers),
        precision=precisions.pop() if len(precisions) == 1 else "",
        offers=tuple(offers),
    )


def find_model(models: Sequence[ModelStatus], name: str) -> ModelStatus | None:
    """Return the model of a name, an alias or a prefix of a key, in this order of precedence."""
    tests: tuple[Callable[[ModelStatus], bool], ...] = (
        lambda each: each.name == name,
        lambda each: each.precise_name == name,
        lambda each: name in each.aliases,
        lambda each: len(name) >= MIN_PREFIX and each.key.startswith(name),
    )
    found = (each for matches in tests for each in models if matches(each))
    return next(found, None)


def as_asked(model: ModelStatus, name: str) -> ModelStatus:
    """Return a model as a name means it: by a name with a precision it has no providers."""
    if name != model.precise_name:
        return model
    return replace(model, name=name, shared=model.shared_name, beside=()) if model.key else model


def unanswered(status: MeshStatus) -> str:
    """Say how many members of the mesh do not answer; empty if one does, or there is none."""
    count = status.unanswered
    verb = "does" if count == 1 else "do"
    return f"{counted(count, 'member')} of this mesh {verb} not answer" if count else ""


def to_json(value: object) -> dict[str, Any]:
    """Convert one of these to a JSON object; the sender adds the `SCHEMA`."""
    fields: dict[str, Any] = lay_out(value)
    return fields


def from_json(kind: type[T], found: object) -> T:
    """Read the output of `to_json`, of this or a later version with the same schema.

    Raises:
        PeerFault: a field is missing or of a wrong type, or the schema differs.
    """
    schema = found.get("schema", SCHEMA) if isinstance(found, dict) else SCHEMA
    if schema != SCHEMA:
        raise PeerFault(
            f"The node reports status schema {schema}; this command reads {SCHEMA}",
            hint="use the same version of meshllm as the node",
        )
    try:
        return build(kind, found, strict=False)
    except UserError as error:
        raise PeerFault(f"Invalid status from the node: {error}") from None
