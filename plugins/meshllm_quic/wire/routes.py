"""Where the datagrams of one connection go."""

from dataclasses import dataclass

from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import Tag


@dataclass(frozen=True, slots=True)
class Direct:
    """Straight to the other side."""

    address: Address


@dataclass(frozen=True, slots=True)
class Through:
    """Through a relay, to whom is registered there."""

    relay: Address
    """Names the relay, also where it is reached over something other than UDP."""
    to: Tag


Route = Direct | Through


def show(address: Address) -> str:
    """Write an address for people."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
