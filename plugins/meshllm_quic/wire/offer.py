"""The candidate addresses of one side, sent to the peer inside QUIC."""

from dataclasses import dataclass
from typing import Self

from meshllm.errors import PeerFault
from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import ADDRESS_BYTES, pack_address, unpack_address

KEY_BYTES = 32
MAX_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class CandidateOffer:
    """Body of an OFFER or ANSWER record."""

    key: bytes
    """32 random bytes chosen by the dialer; both sides authenticate probes with it."""
    addresses: tuple[Address, ...]

    def encode(self) -> bytes:
        """Encode the body of a record."""
        return self.key + b"".join(map(pack_address, self.addresses[:MAX_CANDIDATES]))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode the body of a record; raise `PeerFault`."""
        count, rest = divmod(len(body) - KEY_BYTES, ADDRESS_BYTES)
        if count < 0 or count > MAX_CANDIDATES or rest:
            raise PeerFault(f"Invalid offer length {len(body)} B")
        places = range(KEY_BYTES, len(body), ADDRESS_BYTES)
        addresses = (unpack_address(body[place : place + ADDRESS_BYTES]) for place in places)
        return cls(body[:KEY_BYTES], tuple(addresses))
