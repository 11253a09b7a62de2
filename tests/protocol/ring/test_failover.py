"""A request whose ring breaks is asked again, and nothing is shown twice."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import LinkLost, MeshError
from meshllm.protocol.ring.failover import AGAIN_S, ATTEMPTS, Failover, Reported
from meshllm.request import Event, Piece, Prefilled
from tests.builders.fake_ring import answer_of

TEXT = "the ring goes on"


def cut(text: str, *places: int) -> list[Event]:
    ends = sorted({0, *(place % len(text) for place in places), len(text)})
    return [Piece(text[a:b]) for a, b in pairwise(ends)]


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 99))), max_size=ATTEMPTS - 1))
def test_the_text_is_shown_once_wherever_rings_break(breaks: list[tuple[int, list[int]]]) -> None:
    failover, shown = Failover(), ""
    for seen, places in breaks:
        for event in cut(TEXT, *places)[:seen]:
            if new := failover.take(event):
                assert isinstance(new, Piece)
                shown += new.text
        failover.lost(LinkLost("gone"))
    for event in [*cut(TEXT, 3, 8), answer_of(TEXT, 4)]:
        if isinstance(new := failover.take(event), Piece):
            shown += new.text

    assert shown == TEXT


@pytest.mark.parametrize("second", ["the king", "th", "other"])
def test_another_text_ends_the_request(second: str) -> None:
    failover = Failover()
    failover.take(Piece("the ring"))
    failover.lost(LinkLost("gone"))

    def repeat() -> None:
        for event in (Piece(second), answer_of(second, 1)):
            failover.take(event)

    with pytest.raises(MeshError, match="the next one wrote another"):
        repeat()


def test_pauses_grow_and_attempts_end() -> None:
    failover, error = Failover(), LinkLost("gone")

    pauses = [failover.lost(error) for _ in range(ATTEMPTS - 1)]

    assert pauses == [AGAIN_S * number for number in range(1, ATTEMPTS)]
    with pytest.raises(LinkLost, match="gone"):
        failover.lost(error)


def test_what_an_ingress_reports_is_final() -> None:
    with pytest.raises(Reported):
        Failover().lost(Reported("no ring"))


def test_progress_is_told_in_each_attempt() -> None:
    failover = Failover()
    failover.take(Prefilled(8, 8))
    failover.lost(LinkLost("gone"))

    assert failover.take(Prefilled(4, 8)) == Prefilled(4, 8)
