"""How a node and its model are to be run."""

from dataclasses import dataclass, field
from pathlib import Path

from meshllm.names import Quant, Span, WireMode
from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.drafting.window import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """How a model is held and run; the same record for a node and for a ring in one process."""

    dtype: str | None = None
    """As ``bfloat16``; None is as stored."""
    quant: Quant | None = None
    """How weights are held; None is that of the mesh, as stored in a new one."""
    device: str = "cpu"
    """Where layers are computed: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: int | None = None
    """Cores that torch may use; measured when None."""
    exact: bool = False
    """Compute each token as transformers does, to the last bit, without speculation."""
    speculation: bool = True
    """Draft tokens and verify several in one step, where the model allows it."""
    draft: str | None = None
    """A model that drafts too, on the entry: `builtin`, a folder or a Hugging Face name."""
    drafting: Drafting | None = None
    """Drafts in place of the suffix tree over this session and past ones."""
    depth: int = MAX_DEPTH
    """Steps with drafts in flight at most; 1 waits for each before the next."""
    chunk: int | None = None
    """Rows of a prefill chunk; chosen by the length of the prompt when None."""
    wire: WireMode = WireMode.EXACT
    """How hidden states travel to the next rank."""
    memory_bytes: int | None = None
    """Memory of the process; None is a share of what is free."""
    prefix_bytes: int | None = None
    """Memory for the prefix cache; None is what sessions leave of the KV budget."""
    cache: Path | None = None
    """Folder in which quantised matrices are kept."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What the owner of a node wants; what is None is left to the mesh, or measured."""

    state: Path
    """Folder of key, mesh and door."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    model: str | None = None
    """`builtin`, a folder or a Hugging Face name; None is the model of the mesh."""
    transports: tuple[str, ...] = ("websocket", "quic")
    listen: tuple[str, ...] = ()
    """One address in the words of each transport; where there is none, the transport chooses."""
    advertise: tuple[str, ...] = ()
    """More addresses under which others reach this node."""
    relays: tuple[str, ...] = ()
    """Through which others reach this node, where no straight way is."""
    join: str | None = None
    """Ticket."""
    name: str | None = None
    layers: Span | None = None
    """Hold exactly these."""
    policy: str | None = None
    members: int | None = None
    exclude: tuple[str, ...] | None = None
    """Names or ids of nodes."""
    prefer: tuple[str, ...] | None = None
    discovery: bool = True
    context: int | None = None
    """Tokens of one session for which there is to be room."""
