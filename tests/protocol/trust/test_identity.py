"""Node ids: what is shown is read back, and what is mistyped is noticed."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import UserError
from meshllm.names import NodeId
from meshllm.protocol.trust.identity import NodeKey, parse_node, short, show, verify
from tests.property.strategies import nodes

KEY = NodeKey(bytes(range(32)))
SHOWN = "aoqqpp7-tzyil4d-hlq3umo-os6atfm-t6jvrqt-osq2xy2-53sdgie-svgg4a3"


@pytest.mark.property
@given(nodes)
def test_what_is_shown_is_read_back(node: NodeId) -> None:
    shown = show(node)

    assert parse_node(shown) == node
    assert parse_node(f" {shown.upper().replace('-', ' ')}\n") == node
    assert [len(group) for group in shown.split("-")] == [7] * 8
    assert shown.startswith(short(node))


def test_a_node_id_is_shown_as_it_always_was() -> None:
    assert show(KEY.node) == SHOWN
    assert short(KEY.node) == SHOWN[:7]


@pytest.mark.parametrize("place", [place for place, c in enumerate(SHOWN) if c != "-"])
def test_one_wrong_character_is_noticed(place: int) -> None:
    for other in set(string.ascii_lowercase + "234567") - {SHOWN[place]}:
        with pytest.raises(UserError, match="is no node id"):
            parse_node(SHOWN[:place] + other + SHOWN[place + 1 :])


def test_neighbours_that_changed_places_are_noticed() -> None:
    typed = SHOWN.replace("-", "")
    for place in range(len(typed) - 1):
        swapped = typed[:place] + typed[place + 1] + typed[place] + typed[place + 2 :]
        if swapped != typed:
            with pytest.raises(UserError):
                parse_node(swapped)


@pytest.mark.property
@given(st.text(max_size=80) | st.text("abcdefghijklmnopqrstuvwxyz234567", max_size=80))
def test_garbage_is_no_node_id(text: str) -> None:
    with pytest.raises(UserError):
        parse_node(text)


@pytest.mark.parametrize("text", ["", SHOWN[:-1], SHOWN + "a", SHOWN * 2, "0" * 56, "é" * 56])
def test_what_is_no_node_id_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(UserError, match="is no node id") as caught:
        parse_node(text)

    assert caught.value.hint is not None
    assert len(str(caught.value)) < 110


def test_a_signature_is_of_one_key_and_one_text() -> None:
    signature = KEY.sign(b"words")

    assert verify(KEY.node, b"words", signature)
    assert not verify(KEY.node, b"other words", signature)
    assert not verify(NodeKey(bytes(32)).node, b"words", signature)
    assert not verify(KEY.node, b"words", signature[:-1])


@pytest.mark.property
@given(nodes, st.binary(max_size=70))
def test_garbage_has_signed_nothing(node: NodeId, signature: bytes) -> None:
    assert not verify(node, b"words", signature)
    assert not verify(NodeId(node[:-1]), b"words", signature)
