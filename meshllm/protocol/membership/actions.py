"""What the machine of the mesh asks of its driver; does nothing by itself."""

from dataclasses import dataclass
from typing import TypeAlias

from meshllm.names import NodeId
from meshllm.protocol.membership.codec import Message, Talk, Why


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the peer."""

    peer: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """The peer sent this for the node above."""

    peer: NodeId
    message: Talk


@dataclass(frozen=True, slots=True)
class Drop:
    """Say Bye and close a link to the peer; the machine has let go of it already."""

    peer: NodeId
    why: Why
    is_newcomer: bool = False
    """It is the link that was reported in this call, not the one that stood before."""
    text: str = ""
    """More for people, where there is more."""


@dataclass(frozen=True, slots=True)
class Parted:
    """The peer said Bye; close the link."""

    peer: NodeId
    why: Why


@dataclass(frozen=True, slots=True)
class Dial:
    """Reach the peer at any of these addresses; answer with ``linked`` or ``refused``."""

    peer: NodeId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """Something on which an agreement depends may have changed."""


Action: TypeAlias = Send | Deliver | Drop | Parted | Dial | Changed
