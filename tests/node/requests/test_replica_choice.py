"""The choice of a ring for a request."""

from collections import Counter
from contextlib import ExitStack

import pytest

from meshllm.errors import LinkLost
from meshllm.names import NodeId
from meshllm.node.requests.replica_choice import MARGIN, ReplicaChoice
from meshllm.request import Request, Turn
from tests.builders.offers import A, B, C, node

RINGS = (A, B, C)


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def test_requests_that_begin_alike_go_to_the_same_ring() -> None:
    choice = ReplicaChoice()
    system: Turn = {"role": "system", "content": "Be brief."}
    answer: Turn = {"role": "assistant", "content": "a"}

    for number in range(20):
        first = Request(turns=(system, user(f"question {number}")))
        second = Request(turns=(*first.turns, answer, user("and then?")))
        long = Request(raw="x" * 300 + str(number))
        ids = Request(ids=(number, 2, 3))
        assert choice.choose(RINGS, first) == choice.choose(RINGS[::-1], second)
        assert choice.choose(RINGS, long) == choice.choose(RINGS, Request(raw="x" * 300))
        assert choice.choose(RINGS, ids) == choice.choose(RINGS[1:] + RINGS[:1], ids)
        assert choice.choose(RINGS, Request(turns=(answer,))) in RINGS


def test_beginnings_are_spread_and_a_ring_that_goes_moves_only_its_share() -> None:
    choice = ReplicaChoice()
    requests = [Request(raw=f"{number}, please") for number in range(300)]
    rings = [node(number) for number in range(1, 5)]

    before = [choice.choose(rings, each) for each in requests]
    after = [choice.choose(rings[1:], each) for each in requests]

    assert min(Counter(before).values()) > 40
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {rings[0]}


def test_a_ring_that_is_busier_by_a_margin_is_passed_over() -> None:
    choice, request = ReplicaChoice(), Request(raw="hello")
    first = choice.choose(RINGS, request)

    with ExitStack() as stack:
        for _ in range(MARGIN - 1):
            stack.enter_context(choice.asking(first, []))
        assert choice.choose(RINGS, request) == first
        stack.enter_context(choice.asking(first, []))
        second = choice.choose(RINGS, request)
        assert second != first
        assert choice.choose((first,), request) == first
        for _ in range(MARGIN):
            stack.enter_context(choice.asking(second, []))
        (third,) = {*RINGS} - {first, second}
        assert choice.choose(RINGS, request) == third
        stack.enter_context(choice.asking(third, []))
        assert choice.choose(RINGS, request) == first  # busier by less than the margin
    assert choice.choose(RINGS, request) == first


def test_the_ring_that_failed_last_is_avoided_while_there_is_another() -> None:
    choice, request, failed = ReplicaChoice(), Request(raw="hello"), list[NodeId]()
    first = choice.choose(RINGS, request)

    with pytest.raises(LinkLost), choice.asking(first, failed):
        raise LinkLost("gone")

    assert failed == [first]
    assert choice.choose(RINGS, request, [first]) != first
    assert choice.choose((first,), request, [first]) == first
    second = choice.choose(RINGS, request, [first])
    assert choice.choose(RINGS, request, [first, second]) == first
