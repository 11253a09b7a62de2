"""Counters of the requests whose ingress is a node."""

from meshllm.names import GroupId, LossCause
from meshllm.node.requests.counts import RequestCounters
from meshllm.protocol.membership.records import MAX_RINGS
from meshllm.request import Interruption
from meshllm.status import LossCounts
from tests.builders.fake_ring import answer_of


def test_the_latest_answers_of_a_few_rings_are_kept() -> None:
    counts = RequestCounters()
    for number in range(MAX_RINGS + 3):
        counts.count(answer_of("", number), GroupId(bytes([number])))
    counts.count(answer_of("", 3), GroupId(bytes([4])))
    counts.count(answer_of("", 9), None)

    assert [*counts.by_ring][-2:] == [bytes([MAX_RINGS + 2]), bytes([4])]
    assert len(counts.by_ring) == MAX_RINGS
    assert (counts.last_tokens, counts.by_ring[GroupId(bytes([4]))][1]) == (9, 3)


def test_losses_are_counted_by_cause() -> None:
    counts = RequestCounters()

    for seconds, given in ((1.5, 3), (0.25, 4)):
        counts.survived(Interruption(LossCause.NODE_LOST, "a node is gone", seconds), given)
    counts.survived(Interruption(LossCause.LINK_LOST, "a link is gone", 2.0), 1)

    assert {*counts.loss_counts({LossCause.NODE_LOST: 9})} == {
        LossCounts(LossCause.NODE_LOST, 2, 1.75, 7, rows=9),
        LossCounts(LossCause.LINK_LOST, 1, 2.0, 1),
    }
