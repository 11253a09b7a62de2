"""The routes that the datagrams of a connection can take."""

from dataclasses import dataclass

from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import Tag


@dataclass(frozen=True, slots=True)
class Direct:
    """Directly to the peer."""

    address: Address


@dataclass(frozen=True, slots=True)
class ViaRelay:
    """Through a relay, to a node that is registered there."""

    relay: Address
    """Identifies the relay, also when it is reached through a stream."""
    to: Tag


Route = Direct | ViaRelay


def show(address: Address) -> str:
    """Format an address as ``HOST:PORT``."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
