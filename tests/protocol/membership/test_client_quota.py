"""Tokens of clients, by day."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import Busy, QuotaUsed
from meshllm.names import LossCause, NodeId
from meshllm.protocol.membership.client_quota import (
    DAY_S,
    MAX_TOKENS_PER_DAY,
    SOON_S,
    TURN_TOKENS,
    ClientQuota,
    Reservation,
    SpentTokens,
    estimate,
    places,
)
from meshllm.protocol.trust.credential import NO_LIMITS, ClientLimits
from meshllm.request import (
    TYPICAL_TOKENS,
    Answer,
    Event,
    Interruption,
    Piece,
    Prefilled,
    Request,
    Tools,
    Turn,
)
from tests.builders.fake_ring import answer_of

ONE, OTHER = NodeId(b"1" * 32), NodeId(b"2" * 32)
NOON = 20_000 * DAY_S + DAY_S / 2
LIMITS = ClientLimits(tokens_per_day=1000)
SHORT = Request(raw="x" * 40)  # of 10 tokens
COUNTED = replace(SHORT, max_tokens=0)
GIVEN = tuple(range(400))
LONG_TURN: Turn = {"role": "user", "content": "x" * 40}


def used_up(quota: ClientQuota, tokens: int, client: NodeId = ONE) -> None:
    """Use tokens of a client in an answer."""
    asked = quota.reserve(client, NO_LIMITS, SHORT, NOON)
    answer = answer_of("", tokens)
    asked.take(replace(answer, prompt_tokens=0), NOON)
    asked.end(NOON)


def left(quota: ClientQuota, client: NodeId = ONE) -> int:
    return quota.left(client, LIMITS, NOON)


@pytest.fixture
def quota() -> ClientQuota:
    return ClientQuota()


def test_a_client_is_refused_once_its_tokens_are_used(quota: ClientQuota) -> None:
    used_up(quota, 999)

    assert (quota.objection(ONE, LIMITS, NOON), left(quota)) == (None, 1)
    used_up(quota, 1)

    error = quota.objection(ONE, LIMITS, NOON)
    assert "1000 of 1000 tokens of today (UTC)" in str(error)
    assert error
    assert error.retry_s == DAY_S / 2
    assert left(quota) == 0
    assert quota.objection(OTHER, LIMITS, NOON) is None
    assert quota.objection(ONE, NO_LIMITS, NOON) is None


def test_a_client_without_a_limit_has_tokens_left(quota: ClientQuota) -> None:
    assert quota.left(ONE, NO_LIMITS, NOON) == MAX_TOKENS_PER_DAY


def test_the_count_restarts_at_midnight(quota: ClientQuota) -> None:
    used_up(quota, 1000)

    assert quota.objection(ONE, LIMITS, NOON + DAY_S / 2 - 1)
    assert not quota.objection(ONE, LIMITS, NOON + DAY_S / 2)
    assert quota.left(ONE, LIMITS, NOON + DAY_S / 2) == 1000


@given(st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.integers(0, 40)), max_size=20))
def test_each_client_is_counted_alone(spent: list[tuple[NodeId, int]]) -> None:
    quota = ClientQuota()
    for client, tokens in spent:
        used_up(quota, tokens, client)

    for client in (ONE, OTHER):
        used = sum(each for who, each in spent if who == client)
        assert quota.left(client, LIMITS, NOON) == 1000 - used


def test_requests_at_the_same_time_share_what_is_left(quota: ClientQuota) -> None:
    used_up(quota, 900)

    first = quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=50), NOON)
    second = quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=50), NOON)

    assert (first.request.max_tokens, second.request.max_tokens) == (50, 30)
    error = quota.objection(ONE, LIMITS, NOON)
    assert "1000 of 1000 tokens" in str(error)
    assert error
    assert error.retry_s == SOON_S
    with pytest.raises(Busy, match="about 10 tokens; 0 of 1000 tokens"):
        quota.reserve(ONE, LIMITS, SHORT, NOON)
    first.end(NOON)
    assert left(quota) == 60
    second.end(NOON)
    assert left(quota) == 100


def test_the_reservation_of_an_answer_without_a_limit_grows_with_it(quota: ClientQuota) -> None:
    asked = quota.reserve(ONE, LIMITS, SHORT, NOON)

    assert (asked.request.max_tokens, asked.request.bound) == (None, 1000 - 10)
    assert left(quota) == 1000 - 10 - TYPICAL_TOKENS
    for token in range(900):
        asked.take(Piece("a", (token,)), NOON)
    assert left(quota) == 1000 - 10 - 900
    with pytest.raises(QuotaUsed, match="exceeds what is left"):
        asked.take(Piece("a", tuple(range(100))), NOON)


def test_an_answer_without_a_limit_gets_none_from_a_client_without_one(quota: ClientQuota) -> None:
    endless = quota.reserve(ONE, ClientLimits(), SHORT, NOON)
    assert endless.request.bound is None
    endless.end(NOON)
    used_up(quota, 900)
    assert quota.reserve(ONE, LIMITS, SHORT, NOON).request.bound == 90


def test_a_client_without_a_limit_reserves_nothing(quota: ClientQuota) -> None:
    asked = replace(SHORT, max_tokens=(1 << 63) - 1)
    endless = quota.reserve(ONE, NO_LIMITS, asked, NOON)

    assert endless.request == asked
    assert quota.objection(ONE, NO_LIMITS, NOON) is None
    endless.take(Piece("a", (1,)), NOON)
    endless.end(NOON)
    assert left(quota) == 1000 - 11


def test_a_prompt_that_may_be_read_several_times_is_reserved_as_often(
    quota: ClientQuota,
) -> None:
    asked = quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=50), NOON, reads=9)

    assert left(quota) == 1000 - 9 * 10 - 50
    asked.end(NOON)
    assert left(quota) == 1000
    with pytest.raises(QuotaUsed, match="The prompt has about 1010 tokens"):
        quota.reserve(ONE, LIMITS, SHORT, NOON, reads=101)


def test_a_reservation_lasts_beyond_midnight(quota: ClientQuota) -> None:
    asked = quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=100), NOON)
    tomorrow = NOON + DAY_S

    assert quota.left(ONE, LIMITS, tomorrow) == 1000 - 110
    asked.take(answer_of("", 5), tomorrow)
    asked.end(tomorrow)

    assert quota.left(ONE, LIMITS, tomorrow) == 1000 - 7


@pytest.mark.parametrize(("chars", "is_refused"), [(3996, False), (4000, True)])
def test_a_prompt_that_leaves_no_room_is_refused(
    quota: ClientQuota, chars: int, is_refused: bool
) -> None:
    request = Request(raw="x" * chars)
    if not is_refused:
        assert quota.reserve(ONE, LIMITS, request, NOON).request.bound == 1
        return
    with pytest.raises(Busy, match="about 1000 tokens; 1000 of 1000 tokens of today"):
        quota.reserve(ONE, LIMITS, request, NOON)
    assert left(quota) == 1000


def test_a_resumed_answer_may_be_as_long_as_is_left_behind_its_tokens(quota: ClientQuota) -> None:
    used_up(quota, 690)

    resumed = quota.reserve(ONE, LIMITS, replace(SHORT, given=GIVEN, max_tokens=900), NOON)

    assert resumed.request.max_tokens == len(GIVEN) + 300
    resumed.take(Prefilled(410, 410), NOON)
    for _ in range(300):
        resumed.take(Piece("x", (1,)), NOON)


def test_the_given_tokens_are_read_and_count(quota: ClientQuota) -> None:
    resumed = quota.reserve(ONE, LIMITS, replace(SHORT, given=GIVEN, max_tokens=900), NOON)
    resumed.take(Prefilled(410, 410), NOON)
    resumed.take(replace(answer_of("", 5), prompt_tokens=10), NOON)
    resumed.end(NOON)

    assert left(quota) == 1000 - 10 - 400 - 5


def test_a_resumed_answer_that_is_whole_already_needs_no_room(quota: ClientQuota) -> None:
    used_up(quota, 990)

    whole = quota.reserve(ONE, LIMITS, replace(SHORT, given=GIVEN, max_tokens=400), NOON)

    assert whole.request.max_tokens == 400


def test_a_prompt_longer_than_estimated_takes_more_of_the_day(quota: ClientQuota) -> None:
    asked = quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=5), NOON)

    asked.take(Prefilled(100, 900), NOON)

    assert left(quota) == 100
    asked.end(NOON)
    assert left(quota) == 900  # that much was read


def test_a_prompt_beyond_what_is_left_ends_its_request(quota: ClientQuota) -> None:
    asked = quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=5), NOON)

    with pytest.raises(Busy, match="tokens of today") as raised:
        asked.take(Prefilled(100, 1001), NOON)

    assert raised.value.hint
    asked.end(NOON)
    assert left(quota) == 900


def test_an_answer_never_exceeds_the_day_by_more_than_its_last_piece(quota: ClientQuota) -> None:
    asked = quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=2000), NOON)
    asked.take(Prefilled(100, 100), NOON)  # 90 more than estimated

    assert asked.request.max_tokens == 990
    for _ in range(900):
        asked.take(Piece("x", (1,)), NOON)
    with pytest.raises(Busy):
        asked.take(Piece("x", (1,)), NOON)

    asked.end(NOON)
    assert left(quota) == 0
    assert "1001 of 1000 tokens" in str(quota.objection(ONE, LIMITS, NOON))


def test_a_complete_answer_is_never_refused(quota: ClientQuota) -> None:
    asked = quota.reserve(ONE, LIMITS, SHORT, NOON)
    asked.take(replace(answer_of("", 9), prompt_tokens=5000), NOON)
    asked.end(NOON)

    assert left(quota) == 0


def test_what_fails_before_anything_is_computed_costs_nothing(quota: ClientQuota) -> None:
    asked = quota.reserve(ONE, LIMITS, Request(raw="x" * 3996), NOON)
    asked.take(Interruption(LossCause.NODE_LOST, "", 0), NOON)
    asked.end(NOON)

    assert left(quota) == 1000


def test_counting_a_prompt_costs_nothing(quota: ClientQuota) -> None:
    used_up(quota, 999)

    asked = quota.reserve(ONE, LIMITS, COUNTED, NOON)
    asked.take(answer_of("", 0), NOON)
    asked.end(NOON)

    assert asked.request.max_tokens == 0
    assert left(quota) == 1


@given(st.data())
def test_reservations_are_returned_whatever_happens(data: st.DataObject) -> None:
    quota, running = ClientQuota(), list[Reservation]()
    for _ in range(data.draw(st.integers(1, 8))):
        request = Request(
            ids=(1,) * data.draw(st.integers(1, 300)), max_tokens=data.draw(st.integers(1, 900))
        )
        before = left(quota)
        try:
            asked = quota.reserve(ONE, LIMITS, request, NOON)
        except Busy:
            assert before <= len(request.ids)
        else:
            cost = len(request.ids) + asked.request.expected_tokens
            assert before - left(quota) == cost <= before
            running.append(asked)
    for asked in running:
        asked.end(NOON)

    assert left(quota) == 1000


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (SHORT, 10),
        (Request(raw="é" * 40), 20),
        (Request(ids=(7,) * 9), 9),
        (Request(turns=(LONG_TURN, LONG_TURN)), 2 * (10 + TURN_TOKENS)),
        (
            Request(turns=({"role": "user", "content": ""},), tools=Tools("x" * 40)),
            10 + TURN_TOKENS,
        ),
        (replace(SHORT, raw="\ud800" * 4), 1),
        (COUNTED, 0),
        (replace(COUNTED, embeds=True), 10),
        (replace(COUNTED, scores_prompt=True), 10),
    ],
)
def test_the_length_of_a_prompt_is_estimated(request_: Request, tokens: int) -> None:
    assert estimate(request_) == tokens


def spent(request: Request, *events: Event) -> int:
    counted = SpentTokens(request)
    for event in events:
        counted.take(event)
    return counted.total


def answer(written: int, **changes: object) -> Answer:
    return replace(answer_of("ab", written), **changes)  # type: ignore[arg-type]  # of fields


def test_a_whole_answer_is_counted_as_it_reports() -> None:
    assert spent(SHORT, Prefilled(9, 9), Piece("a", (1,)), Piece("b", (2, 3)), answer(3)) == 5
    assert spent(SHORT, answer(3)) == 5


def test_a_scored_prompt_counts_once() -> None:
    scored = replace(SHORT, scores_prompt=True)

    assert spent(scored, answer(3)) == 3  # of which 2 are the prompt


def test_an_embedding_counts_its_prompt() -> None:
    assert spent(replace(SHORT, embeds=True), answer(0, embedding="AAAA")) == 2


def test_a_prompt_that_was_read_counts_also_without_an_answer_to_it() -> None:
    assert spent(SHORT, Prefilled(2, 2), answer(0)) == 2


@pytest.mark.parametrize("event", [Prefilled(-9, -9), answer(3, prompt_tokens=-9)])
def test_what_an_entry_reports_returns_no_tokens(event: Event) -> None:
    assert spent(SHORT, event, Piece("")) == 0


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ((), 0),
        ((Prefilled(0, 50),), 0),
        ((Prefilled(20, 50),), 20),
        ((Prefilled(20, 50), Prefilled(10, 50)), 20),  # again, after a loss
        ((Prefilled(50, 50), Piece("a", (1, 2)), Piece("held back")), 52),
        ((Piece("of an engine"), Piece(""), Piece("too")), 10 + 2),
    ],
)
def test_a_cancelled_answer_counts_what_was_computed(
    events: tuple[Event, ...], tokens: int
) -> None:
    assert spent(SHORT, *events) == tokens


@pytest.mark.parametrize(("asked", "most"), [(0, 2), (1, 1), (2, 2), (3, 2), (65_535, 2)])
def test_a_ticket_only_lowers_the_requests_of_a_client(asked: int, most: int) -> None:
    assert places(ClientLimits(asked), 2) == most


@pytest.mark.parametrize(("chars", "retry_s"), [(3000, SOON_S), (3600, DAY_S / 2)])
def test_a_refused_client_learns_when_to_ask_again(
    quota: ClientQuota, chars: int, retry_s: float
) -> None:
    used_up(quota, 200)
    quota.reserve(ONE, LIMITS, replace(SHORT, max_tokens=700), NOON)

    with pytest.raises(QuotaUsed) as raised:
        quota.reserve(ONE, LIMITS, Request(raw="x" * chars), NOON)

    assert raised.value.retry_s == retry_s


def test_the_limit_of_a_key_is_called_so() -> None:
    quota = ClientQuota("key")
    quota.learn("laptop", 1000, NOON)

    assert "the limit of the key" in str(quota.objection("laptop", LIMITS, NOON))


def test_what_was_stored_is_counted_once(quota: ClientQuota) -> None:
    quota.learn(ONE, 100, NOON)
    used_up(quota, 50)

    for stored, expected in ((100, 150), (150, 150), (400, 400)):  # the last by another process
        quota.learn(ONE, stored, NOON)
        assert left(quota) == 1000 - expected
