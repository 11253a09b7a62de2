"""A request whose ring breaks continues on the next one: every token once, the text once."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import Busy, LinkLost, QuotaUsed
from meshllm.names import LossCause
from meshllm.protocol.ring.failover import ATTEMPTS, RETRY_DELAY_S, Failover, RetriesExhausted
from meshllm.request import (
    Answer,
    Event,
    Interruption,
    Logprob,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Resumable,
    TokenLogprobs,
    Waiting,
)
from tests.builders.fake_ring import answer_of

REQUEST = Request(raw="What is a ring?", max_tokens=9, given=(7,))
TEXTS = ("the", " r", "", "ing", " goes")
TAIL = " on"
GONE = LinkLost("gone")


def events(request: Request) -> list[Event]:
    """Answer as an entry does that was given the first tokens."""
    first = len(request.given) - len(REQUEST.given)
    pieces: list[Event] = [Piece(text, (i,)) for i, text in enumerate(TEXTS) if i >= first]
    answer = answer_of("".join((*TEXTS[first:], TAIL)), len(TEXTS) - first)
    return [Prefilled(4, 4), *pieces, Piece(TAIL), with_tokens(answer, range(first, len(TEXTS)))]


def with_tokens(answer: Answer, tokens: range) -> Answer:
    return replace(answer, tokens=tuple(tokens))


@given(st.lists(st.integers(0, len(TEXTS) + 2), max_size=ATTEMPTS - 1))
def test_every_token_and_text_is_shown_once_wherever_rings_break(breaks: list[int]) -> None:
    failover, shown = Failover(REQUEST), list[Event]()
    for seen in breaks:
        shown += filter(None, map(failover.take, events(failover.request)[:seen]))
        failover.failed(GONE)
    shown += filter(None, map(failover.take, events(failover.request)))

    pieces = [event for event in shown if isinstance(event, Piece)]
    assert "".join(piece.text for piece in pieces) == "".join(TEXTS) + TAIL
    assert [token for piece in pieces for token in piece.tokens] == [*range(len(TEXTS))]
    assert isinstance(shown[-1], Answer)
    assert (shown[-1].text, shown[-1].tokens) == ("".join(TEXTS) + TAIL, (0, 1, 2, 3, 4))


@pytest.mark.parametrize("losses", [1, 2])
def test_the_end_of_a_text_that_was_shown_before_a_loss_is_shown_once(losses: int) -> None:
    failover, shown = Failover(REQUEST), list[Event | None]()

    for _ in range(losses):
        shown += map(failover.take, events(failover.request)[:-1])
        failover.failed(GONE)
    shown += map(failover.take, events(failover.request))

    answer = shown[-1]
    assert shown.count(Piece(TAIL)) == 1
    assert isinstance(answer, Answer)
    assert (answer.text, answer.tokens) == ("".join(TEXTS) + TAIL, (0, 1, 2, 3, 4))


def test_a_text_without_tokens_is_not_continued_by_another_one() -> None:
    failover = Failover(replace(REQUEST, given=()))
    failover.take(Piece("A ring"))

    with pytest.raises(LinkLost, match="gone"):
        failover.failed(GONE)


def test_the_end_of_a_text_whose_tokens_were_given_is_shown_once() -> None:
    failover = Failover(REQUEST)
    failover.take(Piece(TAIL))

    failover.failed(GONE)

    assert failover.take(Piece(TAIL)) is None


def test_what_a_request_waits_for_is_told() -> None:
    assert Failover(REQUEST).take(Waiting("desk loads it")) == Waiting("desk loads it")


def test_a_late_loss_is_the_last() -> None:
    failover = Failover(REQUEST)
    failover.failed(GONE)

    with pytest.raises(LinkLost):
        failover.failed(GONE, is_late=True)


def test_the_next_attempt_resumes_the_latest_session() -> None:
    failover, first, second = Failover(REQUEST), Resumable("a1", (4,)), Resumable("b2", (4, 9))
    assert failover.take(first) == first  # a client needs it too

    failover.failed(GONE)
    assert failover.request.resume == first
    failover.take(second)
    failover.failed(GONE)
    assert failover.request.resume == second


def test_the_next_attempt_is_given_the_tokens_so_far() -> None:
    failover = Failover(REQUEST)
    assert failover.request == REQUEST

    for token in (1, 2):
        failover.take(Piece("x", (token,)))
    failover.failed(GONE)
    for token in (3, 4):
        failover.take(Piece("x", (token,)))

    assert failover.request.given == (7, 1, 2)
    assert failover.resumed == 2


def test_delays_grow_and_attempts_without_a_token_are_limited() -> None:
    failover = Failover(REQUEST)

    delays = [failover.failed(GONE) for _ in range(ATTEMPTS - 1)]

    assert delays == [RETRY_DELAY_S * number for number in range(ATTEMPTS - 1)]
    with pytest.raises(LinkLost, match="gone"):
        failover.failed(GONE)


def test_a_token_renews_the_attempts() -> None:
    failover = Failover(REQUEST)

    for before, after in pairwise(range(3 * ATTEMPTS)):
        assert failover.failed(GONE) == 0.0
        failover.take(Piece("x", (before * after,)))


def test_what_an_ingress_reports_is_final() -> None:
    with pytest.raises(RetriesExhausted):
        Failover(REQUEST).failed(RetriesExhausted("no ring"))


def test_prefill_is_reported_until_the_first_token() -> None:
    failover = Failover(REQUEST)
    failover.take(Prefilled(8, 8))
    failover.failed(GONE)
    assert failover.take(Prefilled(4, 8)) == Prefilled(4, 8)

    failover.take(Piece("x", (1,)))
    failover.failed(GONE)

    assert failover.take(Prefilled(4, 9)) is None


@pytest.mark.parametrize(
    "told", [Interruption(LossCause.NODE_LOST, "attic is gone", 0.6), PromptTokens(0, (1, 2))]
)
def test_what_is_not_part_of_the_answer_is_passed_on(told: Event) -> None:
    assert Failover(REQUEST).take(told) == told


def test_a_request_that_no_ring_accepted_yet_is_not_retried_when_it_is_refused() -> None:
    with pytest.raises(Busy):
        Failover(REQUEST).failed(Busy("full"))


def test_an_answer_beyond_the_tokens_of_the_day_is_not_retried() -> None:
    failover = Failover(REQUEST)
    failover.take(Piece("a", (1,)))

    with pytest.raises(QuotaUsed):
        failover.failed(QuotaUsed("used up"))


def test_a_refused_request_goes_to_another_ring_at_once_and_that_is_not_an_attempt() -> None:
    failover = Failover(REQUEST)

    for _ in range(2 * ATTEMPTS):
        assert failover.failed(Busy("full"), has_other=True) == 0.0
        assert failover.is_new

    with pytest.raises(Busy):
        failover.failed(Busy("full"))


@given(st.booleans())
def test_another_ring_changes_nothing_for_a_lost_request(has_other: bool) -> None:
    failover = Failover(REQUEST)

    delays = [failover.failed(GONE, has_other=has_other) for _ in range(ATTEMPTS - 1)]

    assert delays == [number * RETRY_DELAY_S for number in range(ATTEMPTS - 1)]
    with pytest.raises(LinkLost):
        failover.failed(GONE, has_other=has_other)


def test_a_ring_that_is_busy_with_the_lost_attempt_is_retried() -> None:
    failover = Failover(REQUEST)
    failover.failed(GONE)

    assert failover.failed(Busy("full")) == RETRY_DELAY_S
    failover.take(Piece("x", (1,)))
    assert failover.failed(Busy("full")) == 0.0


def test_log_probabilities_are_passed_on() -> None:
    told = (TokenLogprobs(Logprob(1, "a", (97,), -0.5)),)

    shown = Failover(REQUEST).take(Piece("a", (1,), told))

    assert shown == Piece("a", (1,), told)
