"""Tokens of clients, by day."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.names import LossCause, NodeId
from meshllm.protocol.membership.client_quota import (
    DAY_S,
    MAX_TOKENS_PER_DAY,
    ClientQuota,
    SpentTokens,
    places,
)
from meshllm.protocol.trust.credential import NO_LIMITS, ClientLimits
from meshllm.request import Interruption, Piece
from tests.builders.fake_ring import answer_of

ONE, OTHER = NodeId(b"1" * 32), NodeId(b"2" * 32)
NOON = 20_000 * DAY_S + DAY_S / 2
LIMITS = ClientLimits(tokens_per_day=100)


def test_a_client_is_refused_once_its_tokens_are_used() -> None:
    quota = ClientQuota()
    quota.spend(ONE, 99, NOON)

    assert (quota.objection(ONE, LIMITS, NOON), quota.left(ONE, LIMITS, NOON)) == ("", 1)
    quota.spend(ONE, 1, NOON)

    assert "100 of 100 tokens of today (UTC)" in quota.objection(ONE, LIMITS, NOON)
    assert quota.left(ONE, LIMITS, NOON) == 1
    assert quota.objection(OTHER, LIMITS, NOON) == quota.objection(ONE, NO_LIMITS, NOON) == ""


def test_a_client_without_a_limit_has_tokens_left() -> None:
    assert ClientQuota().left(ONE, NO_LIMITS, NOON) == MAX_TOKENS_PER_DAY


def test_the_count_begins_anew_at_midnight() -> None:
    quota = ClientQuota()
    quota.spend(ONE, 100, NOON)

    assert quota.objection(ONE, LIMITS, NOON + DAY_S / 2 - 1)
    assert not quota.objection(ONE, LIMITS, NOON + DAY_S / 2)
    assert quota.used(ONE, NOON + DAY_S / 2) == 0


@given(st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.integers(0, 99)), max_size=20))
def test_each_client_is_counted_alone(spent: list[tuple[NodeId, int]]) -> None:
    quota = ClientQuota()
    for client, tokens in spent:
        quota.spend(client, tokens, NOON)

    for client in (ONE, OTHER):
        assert quota.used(client, NOON) == sum(each for who, each in spent if who == client)


def test_a_whole_answer_is_counted_as_it_reports() -> None:
    spent = SpentTokens(400)
    whole = answer_of("ab", 3)
    for event in (Piece("a", (1,)), Piece("b", (2, 3)), whole):
        spent.take(event)

    assert spent.total == whole.prompt_tokens + whole.completion_tokens


def test_a_cancelled_answer_counts_what_was_written_and_the_size_of_its_prompt() -> None:
    spent = SpentTokens(400)
    for event in (
        Piece("a", (1, 2)),
        Piece("engine"),
        Piece(""),
        Interruption(LossCause.NODE_LOST, "", 0),
    ):
        spent.take(event)

    assert spent.total == 100 + 2 + 1


@pytest.mark.parametrize(("asked", "most"), [(0, 2), (1, 1), (2, 2), (3, 2), (65_535, 2)])
def test_a_ticket_only_lowers_the_requests_of_a_client(asked: int, most: int) -> None:
    assert places(ClientLimits(asked), 2) == most
