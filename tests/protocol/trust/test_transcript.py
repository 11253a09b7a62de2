"""Transcripts: equal ones give equal keys, all others do not."""

from collections.abc import Callable

import pytest

from meshllm.errors import MeshError, NotAuthorised, PeerFault
from meshllm.names import MeshId
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.transcript import (
    FIRST_BYTES,
    HELLO_BYTES,
    VERSION,
    HandshakeRandomness,
    Transcript,
)

MESH = MeshId(bytes(range(16)))
KEY = NodeKey(bytes(32))
ONE, OTHER = (
    HandshakeRandomness(bytes([1]) * 32, bytes(16)),
    HandshakeRandomness(bytes([2]) * 32, bytes(16)),
)


def agreed() -> tuple[Transcript, Transcript]:
    """Return both sides after both hellos."""
    dialer, listener = Transcript(MESH, ONE), Transcript(MESH, OTHER)
    first = dialer.first()
    listener.check_first(first)
    dialer.agree(dialer.add(listener.add(listener.hello)))
    listener.agree(first[:HELLO_BYTES])
    return dialer, listener


def test_equal_transcripts_have_equal_keys() -> None:
    dialer, listener = agreed()

    assert listener.unseal("dialer", dialer.seal("dialer", b"words")) == b"words"
    here, there = dialer.keys("dialer", "listener"), listener.keys("listener", "dialer")
    assert (here.outgoing, here.incoming) == (there.incoming, there.outgoing)
    assert len({*here.outgoing, *here.incoming}) == 4


def test_one_more_byte_changes_the_transcript() -> None:
    dialer, listener = agreed()
    listener.add(b"!")

    with pytest.raises(PeerFault, match="of 21 bytes was not sealed by the dialer"):
        listener.unseal("dialer", dialer.seal("dialer", b"words"))


def test_equal_messages_are_never_sealed_alike() -> None:
    dialer, _ = agreed()

    assert dialer.seal("dialer", b"words") != dialer.seal("dialer", b"words")


def test_a_node_is_authenticated_by_its_signature() -> None:
    dialer, listener = agreed()

    signed = listener.identify("listener", KEY, b"words")

    assert dialer.recognise("listener", signed) == (KEY.node, b"words")


@pytest.mark.parametrize(
    ("words", "reason"), [(bytes(95), "expected 96"), (KEY.node + bytes(64), "did not sign")]
)
def test_an_invalid_identity_is_refused(words: bytes, reason: str) -> None:
    dialer, listener = agreed()

    with pytest.raises(PeerFault, match=reason):
        dialer.recognise("listener", listener.seal("listener", words))


def test_a_signature_of_the_other_side_is_refused() -> None:
    dialer, listener = agreed()

    with pytest.raises(PeerFault, match="was not sealed"):
        dialer.recognise("dialer", listener.identify("listener", KEY, b""))


@pytest.mark.parametrize(
    ("forge", "error", "words"),
    [
        (lambda first: b"", PeerFault, "version ``"),
        (lambda first: bytes([VERSION + 1]) + first[1:], PeerFault, f"version `{VERSION + 1:02x}`"),
        (lambda first: first[:-1], PeerFault, f"{FIRST_BYTES - 1} bytes"),
        (
            lambda first: first[:-1] + bytes([first[-1] ^ 1]),
            NotAuthorised,
            "knows neither this mesh",
        ),
    ],
)
def test_an_invalid_first_message_is_refused(
    forge: Callable[[bytes], bytes], error: type[MeshError], words: str
) -> None:
    with pytest.raises(error, match=words):
        Transcript(MESH, OTHER).check_first(forge(Transcript(MESH, ONE).first()))


def test_a_hail_with_a_low_order_key_is_refused() -> None:
    transcript = Transcript(MESH, ONE)

    with pytest.raises(PeerFault, match="low-order"):
        transcript.agree(bytes([VERSION]) + bytes(HELLO_BYTES - 1))
    with pytest.raises(PeerFault, match="Hello of 1 bytes"):
        transcript.agree(bytes([VERSION]))
