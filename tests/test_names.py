"""Node ids: the text form round-trips, and typing errors are detected; spans overlap or not."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import UserError
from meshllm.names import NodeId, Span, parse_node, short, show
from meshllm.protocol.trust.identity import NodeKey
from tests.property.strategies import nodes

KEY = NodeKey(bytes(range(32)))
SHOWN = "aoqqpp7-tzyil4d-hlq3umo-os6atfm-t6jvrqt-osq2xy2-53sdgie-svgg4a3"


@pytest.mark.property
@given(nodes)
def test_a_shown_node_id_parses_back(node: NodeId) -> None:
    shown = show(node)

    assert parse_node(shown) == node
    assert parse_node(f" {shown.upper().replace('-', ' ')}\n") == node
    assert [len(group) for group in shown.split("-")] == [7] * 8
    assert shown.startswith(short(node))


def test_the_text_form_of_a_node_id_is_stable() -> None:
    assert show(KEY.node) == SHOWN
    assert short(KEY.node) == SHOWN[:7]
    assert parse_node(SHOWN) == KEY.node


@pytest.mark.parametrize("place", [place for place, c in enumerate(SHOWN) if c != "-"])
def test_one_wrong_character_is_detected(place: int) -> None:
    for other in set(string.ascii_lowercase + "234567") - {SHOWN[place]}:
        with pytest.raises(UserError, match="Invalid node id"):
            parse_node(SHOWN[:place] + other + SHOWN[place + 1 :])


def test_swapped_adjacent_characters_are_detected() -> None:
    typed = SHOWN.replace("-", "")
    for place in range(len(typed) - 1):
        swapped = typed[:place] + typed[place + 1] + typed[place] + typed[place + 2 :]
        if swapped != typed:
            with pytest.raises(UserError):
                parse_node(swapped)


@pytest.mark.property
@given(st.text(max_size=80) | st.text("abcdefghijklmnopqrstuvwxyz234567", max_size=80))
def test_garbage_is_not_a_node_id(text: str) -> None:
    with pytest.raises(UserError):
        parse_node(text)


@pytest.mark.parametrize("text", ["", SHOWN[:-1], SHOWN + "a", SHOWN * 2, "0" * 56, "é" * 56])
def test_an_invalid_node_id_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UserError, match="Invalid node id") as caught:
        parse_node(text)

    assert caught.value.hint is not None
    assert len(str(caught.value)) < 110


@pytest.mark.property
@given(*[st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)] * 2)
def test_spans_overlap_if_they_share_a_layer(one: list[int], other: list[int]) -> None:
    first, second = Span(*one), Span(*other)

    assert first.overlaps(second) is bool({*range(*one)} & {*range(*other)})
    assert second.overlaps(first) is first.overlaps(second)
