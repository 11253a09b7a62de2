"""Sealed messages: decrypted once, in order and unaltered, or a fault."""

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import LinkLost, PeerFault
from meshllm.protocol.trust.cipher import (
    MAX_DOUBTFUL,
    OVERHEAD_BYTES,
    REKEY_MESSAGES,
    Buffer,
    Seal,
    Unseal,
    derive,
)

KEY = bytes(range(32))


def sealed(seal: Seal, *parts: Buffer, sent: bool = True) -> bytes:
    """Return a message as it is sent."""
    message = b"".join(seal.seal(parts))
    if sent:
        seal.sent()
    return message


def both() -> tuple[Seal, Unseal]:
    return Seal(KEY), Unseal(KEY)


@pytest.mark.property
@given(st.lists(st.lists(st.binary(max_size=40), max_size=4), max_size=8))
def test_sealed_messages_are_decrypted(messages: list[list[bytes]]) -> None:
    seal, unseal = both()

    for parts in messages:
        message = sealed(seal, *parts)
        assert len(message) == sum(map(len, parts)) + OVERHEAD_BYTES
        assert unseal.open(bytearray(message)) == b"".join(parts)


@pytest.mark.parametrize("size", [2**17 - 1, 2**17, 300_001])
def test_a_large_message_is_sealed_like_a_small_one(size: int) -> None:
    seal, unseal = both()
    block = bytes(range(256)) * (size // 256) + bytes(size % 256)
    words = memoryview(bytearray(block[: size // 8 * 4])).cast("i")

    message = sealed(seal, words, b"", block[size // 8 * 4 :])

    assert message[10:] == AESGCM(KEY).encrypt(bytes(12), block, message[:10])
    assert unseal.open(message) == block


def test_a_large_message_in_a_writable_buffer_is_decrypted_in_place() -> None:
    for kind in (bytes, bytearray):
        seal, unseal = both()
        block = bytes(range(256)) * 1024
        message = kind(sealed(seal, block))

        opened = unseal.open(message)

        assert opened == block
        assert (message[10:-16] == block) is (kind is bytearray)


def test_an_altered_large_message_is_refused() -> None:
    seal, unseal = both()
    message = bytearray(sealed(seal, bytes(2**18)))
    message[1000] ^= 1

    with pytest.raises(PeerFault, match="failed authentication"):
        unseal.open(message)


def test_the_parts_may_be_reused_after_sealing() -> None:
    for size in (10, 2**18):
        seal, unseal = both()
        part = bytearray(size)

        message = sealed(seal, part)
        part[:] = bytes([1]) * size

        assert unseal.open(message) == bytes(size)


def test_equal_messages_have_different_ciphertexts() -> None:
    seal, _ = both()

    assert len({sealed(seal, b"word")[10:] for _ in range(100)}) == 100


def test_a_replayed_message_is_refused() -> None:
    seal, unseal = both()
    message = sealed(seal, b"once")
    unseal.open(message)

    with pytest.raises(PeerFault, match="message 0; expected 1"):
        unseal.open(message)


def test_a_missing_message_is_refused() -> None:
    seal, unseal = both()
    sealed(seal, b"left out")

    with pytest.raises(PeerFault, match="message 1; expected 0"):
        unseal.open(sealed(seal, b"next"))


def test_reordered_messages_are_refused() -> None:
    seal, unseal = both()
    messages = [sealed(seal, bytes([number])) for number in range(3)]
    unseal.open(messages[0])

    with pytest.raises(PeerFault):
        unseal.open(messages[2])


@pytest.mark.parametrize("arrived", [set(), {0}, {1}, {2}, {0, 2}, {0, 1, 2}])
def test_doubtful_messages_may_be_missing(arrived: set[int]) -> None:
    seal, unseal = both()
    doubtful = [sealed(seal, bytes([number]), sent=False) for number in range(3)]
    certain = sealed(seal, b"certain")

    for number in sorted(arrived):
        assert unseal.open(doubtful[number]) == bytes([number])

    assert unseal.open(certain) == b"certain"
    assert unseal.open(sealed(seal, b"next")) == b"next"


def test_a_skipped_doubtful_message_is_refused_later() -> None:
    seal, unseal = both()
    doubtful, certain = sealed(seal, b"?", sent=False), sealed(seal, b"!")
    unseal.open(certain)

    with pytest.raises(PeerFault, match="message 0; expected 2"):
        unseal.open(doubtful)


def test_a_forged_doubtful_count_is_refused() -> None:
    seal, unseal = both()
    sealed(seal, b"certain")
    message = bytearray(sealed(seal, b"next"))
    message[8] = 1

    with pytest.raises(PeerFault, match="failed authentication"):
        unseal.open(message)


def test_too_many_doubtful_messages_lose_the_link() -> None:
    seal, unseal = both()
    for _ in range(MAX_DOUBTFUL):
        sealed(seal, sent=False)

    assert unseal.open(sealed(seal, b"just in time", sent=False)) == b"just in time"

    with pytest.raises(LinkLost, match="65536 sends in a row were cancelled"):
        seal.seal([])


def test_messages_continue_across_a_rekey() -> None:
    seal, unseal = both()
    for _ in range(REKEY_MESSAGES - 1):
        sealed(seal, sent=False)
    last, first = sealed(seal, b"last"), sealed(seal, b"first")
    nonce = REKEY_MESSAGES.to_bytes(12, "little")
    later = AESGCM(derive(KEY, b"", "meshllm rekey 1"))

    assert unseal.open(last) == b"last"
    assert unseal.open(first) == later.decrypt(nonce, first[10:], first[:10]) == b"first"


def test_doubtful_messages_may_span_a_rekey() -> None:
    seal, unseal = both()
    for _ in range(REKEY_MESSAGES - 1):
        sealed(seal, sent=False)
    unseal.open(sealed(seal))
    for _ in range(3):
        sealed(seal, sent=False)

    assert unseal.open(sealed(seal, b"there")) == b"there"


def test_a_truncated_or_altered_message_is_refused() -> None:
    seal, _ = both()
    message = sealed(seal, b"word")

    for place in range(len(message)):
        changed = bytearray(message)
        changed[place] ^= 0x10
        for wrong in (changed, message[:place], message + b"\0"):
            with pytest.raises(PeerFault):
                Unseal(KEY).open(wrong)


def test_another_key_decrypts_nothing() -> None:
    seal, _ = both()

    with pytest.raises(PeerFault):
        Unseal(bytes(32)).open(sealed(seal, b"word"))


def test_a_forged_number_costs_one_key_at_most() -> None:
    seal, unseal = both()
    message = sealed(seal, b"word")
    forged = (2**64 - 1).to_bytes(8, "little") + b"\xff\xff" + message[10:]

    with pytest.raises(PeerFault, match="message 18446744073709551615; expected 0"):
        unseal.open(forged)


@pytest.mark.property
@given(st.binary(max_size=100))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(PeerFault):
        Unseal(KEY).open(garbage)
    with pytest.raises(PeerFault):
        Unseal(KEY).open(bytes(10) + garbage)
