"""Detection of a duplicate identity."""

from functools import partial
from math import inf

from meshllm.errors import NotAuthorised
from meshllm.protocol.membership.twin import TWIN_S, Twin
from tests.builders.offers import A, B


def test_a_peer_that_keeps_refusing_this_node_reveals_a_duplicate() -> None:
    dropped = partial(Twin().dropped, A, is_twin=True, heard=-inf)

    verdicts = [dropped(now=now) for now in (5.0, 5.0 + TWIN_S, 6.0 + TWIN_S)]

    assert verdicts[:2] == [None, None]
    assert isinstance(verdicts[2], NotAuthorised)


def test_another_reason_resets_the_detection() -> None:
    twin = Twin()
    twin.dropped(A, is_twin=True, now=0.0, heard=-inf)
    twin.dropped(A, is_twin=False, now=1.0, heard=-inf)

    assert twin.dropped(A, is_twin=True, now=9.0, heard=-inf) is None
    assert twin.dropped(A, is_twin=True, now=10.0, heard=-inf) is None


def test_a_beat_resets_the_detection() -> None:
    twin = Twin()
    twin.dropped(A, is_twin=True, now=5.0, heard=4.0)

    assert twin.dropped(A, is_twin=True, now=9.0, heard=7.5) is None
    assert twin.dropped(A, is_twin=True, now=9.0 + TWIN_S, heard=7.5) is None
    assert isinstance(twin.dropped(A, is_twin=True, now=9.5 + TWIN_S, heard=7.5), NotAuthorised)


def test_each_peer_is_timed_separately() -> None:
    twin = Twin()
    twin.dropped(A, is_twin=True, now=5.0, heard=-inf)

    assert twin.dropped(B, is_twin=True, now=9.0, heard=-inf) is None
    assert isinstance(twin.dropped(A, is_twin=True, now=9.1, heard=-inf), NotAuthorised)
