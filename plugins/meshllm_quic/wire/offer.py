"""Where one side may be reached, as it tells the other inside QUIC."""

from dataclasses import dataclass
from typing import Self

from meshllm.errors import PeerFault
from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import ADDRESS_BYTES, pack_address, unpack_address

KEY_BYTES = 32
MAX_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """An offer, or the answer to one."""

    key: bytes
    """32 random bytes of the dialer: both sides prove with it that a probe is theirs."""
    addresses: tuple[Address, ...]

    def encode(self) -> bytes:
        """Write it as the body of a word."""
        return self.key + b"".join(map(pack_address, self.addresses[:MAX_CANDIDATES]))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read the body of a word; raise `PeerFault`."""
        count, rest = divmod(len(body) - KEY_BYTES, ADDRESS_BYTES)
        if count < 0 or count > MAX_CANDIDATES or rest:
            raise PeerFault(f"An offer of {len(body)} B")
        places = range(KEY_BYTES, len(body), ADDRESS_BYTES)
        addresses = (unpack_address(body[place : place + ADDRESS_BYTES]) for place in places)
        return cls(body[:KEY_BYTES], tuple(addresses))
