"""Detection of a duplicate identity."""

from functools import partial
from math import inf

from meshllm.errors import NotAuthorised
from meshllm.protocol.membership.duplicate_identity import DUPLICATE_S, FRESH_S, DuplicateIdentity
from tests.builders.offers import A, B


def test_a_peer_that_keeps_refusing_this_node_reveals_a_duplicate() -> None:
    dropped = partial(DuplicateIdentity().dropped, A, is_duplicate=True, heard=-inf)

    verdicts = [dropped(now=now) for now in (5.0, 5.0 + DUPLICATE_S, 6.0 + DUPLICATE_S)]

    assert verdicts[:2] == [None, None]
    assert isinstance(verdicts[2], NotAuthorised)


def test_another_reason_resets_the_detection() -> None:
    found = DuplicateIdentity()
    found.dropped(A, is_duplicate=True, now=0.0, heard=-inf)
    found.dropped(A, is_duplicate=False, now=1.0, heard=-inf)

    assert found.dropped(A, is_duplicate=True, now=9.0, heard=-inf) is None
    assert found.dropped(A, is_duplicate=True, now=10.0, heard=-inf) is None


def test_a_beat_resets_the_detection() -> None:
    found = DuplicateIdentity()
    refused = partial(found.dropped, is_duplicate=True)
    for peer in (A, B):
        refused(peer, now=5.0, heard=4.0)

    for peer in (A, B):
        assert refused(peer, now=9.0, heard=7.5) is None
        assert refused(peer, now=9.0 + DUPLICATE_S, heard=7.5) is None
    assert refused(A, now=9.5 + DUPLICATE_S, heard=7.5) is None
    assert isinstance(refused(B, now=9.5 + DUPLICATE_S, heard=7.5), NotAuthorised)


def test_one_peer_does_not_end_a_process_that_was_accepted() -> None:
    found = DuplicateIdentity()
    refused = partial(found.dropped, is_duplicate=True, heard=4.0)
    for second in range(5, 60):
        assert refused(A, now=float(second)) is None
    assert refused(B, now=60.0 + FRESH_S) is None
    assert refused(B, now=70.0 + FRESH_S) is None  # what A said is too old


def test_each_peer_is_timed_separately() -> None:
    found = DuplicateIdentity()
    found.dropped(A, is_duplicate=True, now=5.0, heard=-inf)

    assert found.dropped(B, is_duplicate=True, now=9.0, heard=-inf) is None
    assert isinstance(found.dropped(A, is_duplicate=True, now=9.1, heard=-inf), NotAuthorised)
