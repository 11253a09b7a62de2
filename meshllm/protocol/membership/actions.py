"""Actions that the mesh machine returns for its driver to carry out."""

from dataclasses import dataclass
from typing import TypeAlias

from meshllm.names import NodeId
from meshllm.protocol.membership.codec import CloseReason, Message, RequestMessage


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send a message to the peer."""

    peer: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class DeliverRequest:
    """Pass a request message of the peer to the node."""

    peer: NodeId
    message: RequestMessage


@dataclass(frozen=True, slots=True)
class Drop:
    """Send `Bye` and close a link to the peer; the machine has removed it already."""

    peer: NodeId
    why: CloseReason
    is_newcomer: bool = False
    """Close the link that was reported in this call, not an earlier one."""
    text: str = ""
    """Details for people; may be empty."""


@dataclass(frozen=True, slots=True)
class ClosedByPeer:
    """Close the link: the peer sent `Bye`."""

    peer: NodeId
    why: CloseReason


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial the peer at any of these addresses; report ``linked`` or ``refused``."""

    peer: NodeId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """Run `agree` again: its input may have changed."""


Action: TypeAlias = SendToPeer | DeliverRequest | Drop | ClosedByPeer | Dial | Changed
