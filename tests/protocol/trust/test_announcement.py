"""Announcements are read by those they are for, and by nobody else."""

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from meshllm.names import NodeId
from meshllm.protocol.trust import announcement as module
from meshllm.protocol.trust.announcement import (
    announce,
    is_announcement,
    read_announcement,
    sealed_bytes,
)
from meshllm.protocol.trust.identity import NodeKey

PSK, RANDOM = b"m" * 16, bytes(range(60))
NONCE = RANDOM[:12]
KEYS = [NodeKey(bytes([number]) * 32) for number in range(6)]
AUTHOR, ONE, OTHER, FORMER = KEYS[:4]


def sealed(*readers: NodeKey, payload: bytes = b"here", author: NodeKey = AUTHOR) -> bytes:
    return announce(author, PSK, [each.node for each in readers], payload, RANDOM)


@given(st.integers(0, 5), st.binary(max_size=500))
def test_readers_and_only_they_read_it(count: int, payload: bytes) -> None:
    data = sealed(*KEYS[1 : 1 + count], payload=payload)

    read = [read_announcement(key, PSK, NONCE, data) for key in KEYS[1:]]

    whole = (AUTHOR.node, payload)
    assert read == [whole if place < count or count == 0 else None for place in range(5)]
    assert len(data) == sealed_bytes(min(count, 5), len(payload))


def test_without_readers_every_node_with_the_pre_shared_key_reads_it() -> None:
    data = sealed()

    assert [read_announcement(key, PSK, NONCE, data) for key in (ONE, OTHER)] == [
        (AUTHOR.node, b"here")
    ] * 2
    assert len(data) == sealed_bytes(0, 4)


def test_without_the_pre_shared_key_nothing_is_read() -> None:
    for data in (sealed(), sealed(ONE)):
        assert read_announcement(ONE, b"x" * 16, NONCE, data) is None


def test_it_is_known_as_one_by_the_pre_shared_key() -> None:
    assert is_announcement(PSK, NONCE, sealed(ONE))
    assert not is_announcement(b"x" * 16, NONCE, sealed(ONE))
    assert not is_announcement(PSK, b"", sealed(ONE))


def test_a_reader_that_is_a_point_of_small_order_is_left_out() -> None:
    odd = NodeId((1).to_bytes(32, "little"))

    data = announce(AUTHOR, PSK, [odd, ONE.node], b"here", RANDOM)

    assert read_announcement(ONE, PSK, NONCE, data) == (AUTHOR.node, b"here")


def test_a_former_member_finds_no_node_in_it() -> None:
    opened: bytes = AESGCM(module._outer(PSK)).decrypt(NONCE, sealed(ONE, OTHER), None)

    assert [each for each in KEYS if opened.find(each.node) >= 0] == []
    assert read_announcement(FORMER, PSK, NONCE, sealed(ONE, OTHER)) is None


def test_every_flipped_bit_and_every_cut_is_detected() -> None:
    data = sealed(ONE, OTHER)

    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        assert read_announcement(ONE, PSK, NONCE, bytes(changed)) is None
        assert read_announcement(ONE, PSK, NONCE, data[:place]) is None
    assert read_announcement(ONE, PSK, b"", data) is None


@pytest.mark.parametrize("inner", [b"", bytes(32), bytes(33), b"\1" * 32, b"\1" * 33 + bytes(99)])
def test_malformed_content_of_who_knows_the_key_is_ignored(inner: bytes) -> None:
    data = AESGCM(module._outer(PSK)).encrypt(NONCE, inner, None)

    assert read_announcement(ONE, PSK, NONCE, data) is None


def test_an_announcement_in_the_name_of_another_is_ignored() -> None:
    class Forger(NodeKey):
        """Signs with its own key."""

    forger = Forger(bytes([5]) * 32)
    forger.node = NodeId(AUTHOR.node)

    assert read_announcement(ONE, PSK, NONCE, sealed(ONE, author=forger)) is None
