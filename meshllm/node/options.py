"""The options of a node and of inference."""

from dataclasses import dataclass, field
from pathlib import Path

from meshllm.names import Quant, Span, WireMode
from meshllm.protocol.drafting.drafter import Drafting

FIRST_MODEL = "builtin"  # of a mesh whose founder gives no `--model`


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """How a model is loaded and run, by a node or by a ring in one process."""

    dtype: str | None = None
    """Data type such as ``bfloat16``; None is as stored."""
    quant: Quant | None = None
    """Quantisation; None is that of the mesh, or as stored in a new mesh."""
    device: str = "cpu"
    """Compute device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: int | None = None
    """Threads of torch; None chooses by measurement."""
    exact: bool = False
    """Compute with plain torch, one row per step, without drafts and prefix cache: bit-identically
    to transformers, unless matrices are quantised or the ``wire`` is lossy."""
    speculation: bool = True
    """Speculative decoding: draft tokens and verify several in one step, if the model allows."""
    draft: str | None = None
    """Draft model, run on the entry: `builtin`, a folder or a Hugging Face name."""
    drafting: Drafting | None = None
    """Drafter that replaces the suffix tree over this session and past ones."""
    chunk: int | None = None
    """Rows of a prefill chunk; None chooses by the prompt length."""
    wire: WireMode = WireMode.EXACT
    """Encoding of the hidden states sent to the next rank."""
    memory_bytes: int | None = None
    """Memory limit of the process; None is a share of the free memory."""
    prefix_bytes: int | None = None
    """Memory for the prefix cache; None is the part of the KV budget not used by sessions."""
    cache: Path | None = None
    """Folder for quantised matrices."""

    @property
    def is_exact(self) -> bool:
        """Whether tokens of a model that is not quantised are bit-identical to transformers'."""
        return self.exact and self.wire in (WireMode.EXACT, WireMode.PLAIN)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of a node; None leaves a value to the mesh, or to measurement."""

    state: Path
    """Folder of the key, the membership and the socket."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    model: str | None = None
    """`builtin`, a folder or a Hugging Face name; None is the model of the mesh."""
    more_models: tuple[str, ...] = ()
    """Further models that this node can hold; without ``model``, those of the mesh that it has."""
    transports: tuple[str, ...] = ()
    """Without any, those of the default that load."""
    listen: tuple[str, ...] = ()
    """At most one address per transport; without any, each transport chooses its own."""
    advertise: tuple[str, ...] = ()
    """Further addresses at which peers reach this node."""
    relays: tuple[str, ...] = ()
    """Relays through which peers reach this node if no direct path exists."""
    join: str | None = None
    """Ticket."""
    name: str | None = None
    layers: Span | None = None
    """Hold exactly this span."""
    policy: str | None = None
    members: int | None = None
    replicas: int | None = None
    exclude: tuple[str, ...] | None = None
    """Names or ids of nodes."""
    prefer: tuple[str, ...] | None = None
    entry: tuple[str, ...] | None = None
    """Nodes beside this one that may be the entry, or ``self``; only the founder can set it."""
    trust: tuple[str, ...] | None = None
    """Names or ids of the nodes that may see prompts asked here; None trusts all members."""
    keep_s: float = 600.0
    """Seconds that a model counts as used after a request to this node."""
    discovery: bool = True
    context: int | None = None
    """Context length of one session that the ring must hold."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a mesh serves a model; None keeps the value, or takes the default for a new model."""

    model: str
    """A model that this node has locally, or a name under which it is served already."""
    quant: str | None = None
    """Another quantisation is another model, beside those that are served."""
    policy: str | None = None
    members: int | None = None
    replicas: int | None = None
    """Rings of the model, if there are nodes for them."""
    context: int | None = None
    aliases: tuple[str, ...] | None = None
    """Other names of the model in requests."""
