"""Keys sign and agree on secrets; points of small order do neither."""

from hashlib import sha512

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.names import NodeId
from meshllm.protocol.trust import identity as module
from meshllm.protocol.trust.identity import NodeKey, agreement_key, verify
from tests.property.strategies import nodes

ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point
KEY = NodeKey(bytes(range(32)))


def test_a_signature_is_valid_for_one_key_and_one_text() -> None:
    signature = KEY.sign(b"words")

    assert verify(KEY.node, b"words", signature)
    assert not verify(KEY.node, b"other words", signature)
    assert not verify(NodeKey(bytes(32)).node, b"words", signature)
    assert not verify(KEY.node, b"words", signature[:-1])


@pytest.mark.property
@given(nodes, st.binary(max_size=70))
def test_garbage_does_not_verify(node: NodeId, signature: bytes) -> None:
    assert not verify(node, b"words", signature)
    assert not verify(NodeId(node[:-1]), b"words", signature)


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("y", sorted({*module._SMALL_ORDER, module._PRIME, module._PRIME + 1}))
def test_nobody_signs_as_a_point_of_small_order(y: int, sign: int) -> None:
    node = NodeId((y | sign << 255).to_bytes(32, "little"))
    # With R = sB, the equation of the verification holds if hA is the identity.
    seed = sha512(bytes(32)).digest()[:32]
    clamped = int.from_bytes(seed, "little") & (2**254 - 8) | 2**254
    forged = NodeKey(bytes(32)).node + (clamped % ORDER).to_bytes(32, "little")

    assert not any(verify(node, b"message %d" % number, forged) for number in range(64))


def test_two_keys_agree_on_a_secret() -> None:
    other = NodeKey(bytes(32))

    secret = KEY.agree(agreement_key(other.node))

    assert secret == other.agree(agreement_key(KEY.node))
    assert secret != KEY.agree(agreement_key(KEY.node))


def test_a_node_id_converts_as_in_libsodium() -> None:
    seed = bytes.fromhex("421151a459faeade3d247115f94aedae42318124095afabe4d1451a559faedee")

    public = agreement_key(NodeKey(seed).node).public_bytes_raw()

    # The vector of libsodium's test of crypto_sign_ed25519_pk_to_curve25519.
    assert public.hex() == "f1814f0e8ff1043d8a44d25babff3cedcae6c22c3edaa48f857ae70de2baae50"


@pytest.mark.parametrize("y", [1, 2**255 - 18], ids=["identity", "not reduced"])
def test_no_secret_is_agreed_with_a_point_of_low_order(y: int) -> None:
    with pytest.raises(ValueError, match="computing shared key"):
        KEY.agree(agreement_key(NodeId(y.to_bytes(32, "little"))))
