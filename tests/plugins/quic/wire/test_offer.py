"""The candidate addresses of one side survive a round trip, and invalid ones raise `PeerFault`."""

import pytest

from meshllm.errors import PeerFault
from meshllm_quic.net.network import Address
from meshllm_quic.wire.lanes import MAX_RECORD_BYTES
from meshllm_quic.wire.offer import KEY_BYTES, MAX_CANDIDATES, CandidateOffer
from meshllm_quic.wire.packets import ADDRESS_BYTES

KEY = bytes(range(KEY_BYTES))
MANY: tuple[Address, ...] = tuple(("2001:db8::1", 1 + number) for number in range(40))


@pytest.mark.parametrize("count", [0, 1, MAX_CANDIDATES])
def test_an_offer_survives_a_round_trip(count: int) -> None:
    offer = CandidateOffer(KEY, (("192.0.2.1", 7000), *MANY)[:count])

    assert CandidateOffer.decode(offer.encode()) == offer


def test_a_long_offer_is_cut_and_fits_a_record() -> None:
    body = CandidateOffer(KEY, MANY).encode()

    assert CandidateOffer.decode(body).addresses == MANY[:MAX_CANDIDATES]
    assert len(body) <= MAX_RECORD_BYTES


@pytest.mark.parametrize(
    "size",
    [
        0,
        KEY_BYTES - 1,
        KEY_BYTES - ADDRESS_BYTES,
        KEY_BYTES + 1,
        KEY_BYTES + ADDRESS_BYTES - 1,
        KEY_BYTES + (MAX_CANDIDATES + 1) * ADDRESS_BYTES,
    ],
)
def test_an_offer_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(PeerFault, match=f"offer length {size} B"):
        CandidateOffer.decode(bytes(size))
