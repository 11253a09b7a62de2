"""How a node is to be run; knows nothing about how it is asked for."""

from dataclasses import dataclass
from pathlib import Path

from meshllm.names import Span, WireMode


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What the owner of a node wants; what is None is left to the mesh, or measured."""

    state: Path
    """Folder of key, mesh and door."""
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
    memory_bytes: int | None = None
    """Memory for models; None is a share of what is free."""
    layers: Span | None = None
    """Hold exactly these."""
    policy: str | None = None
    members: int | None = None
    exclude: tuple[str, ...] | None = None
    """Names or ids of nodes."""
    prefer: tuple[str, ...] | None = None
    dtype: str | None = None
    """As ``bfloat16``; None is as stored."""
    quant: str | None = None
    """As ``int8``; None is that of the mesh, as stored in a new one."""
    threads: int | None = None
    """Cores that torch may use; measured when None."""
    speculation: bool = True
    """Guess at tokens, so that several are computed at once."""
    draft: str | None = None
    """A model that guesses too, when this node is the entry; named as ``model`` is."""
    exact: bool = False
    """Compute each token as transformers does, to the last bit; nobody guesses then."""
    wire: WireMode = WireMode.EXACT
    """How this node sends hidden states to the next one."""
    prefix_bytes: int | None = None
    """Memory for what finished sessions leave; None is a share of what is free."""
    device: str = "cpu"
    """Where layers are computed: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    discovery: bool = True
    context: int | None = None
    """Tokens of one session for which there is to be room."""
