import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.names import LossCause
from meshllm.outline.join import MAX_POINT_CHARS, Join, TokenUsage
from meshllm.outline.points import Point
from meshllm.request import Event, Interruption, Piece, Resumable, Waiting
from tests.builders.fake_ring import answer_of

POINTS = [Point(1, "Parks"), Point(2, "Work"), Point(3, "Friends")]
LOST = Interruption(LossCause.NODE_LOST, "attic is gone", 0.5)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def test_text_that_waits_is_bounded() -> None:
    join = Join(POINTS, TokenUsage())
    most = Piece("x" * MAX_POINT_CHARS)

    assert [*join.take(2, most)] == []
    with pytest.raises(PeerFault, match="more than 65536 characters"):
        [*join.take(2, Piece("x"))]


def test_a_loss_is_told_once_for_all_points() -> None:
    join = Join(POINTS, TokenUsage())
    again = Interruption(LossCause.NODE_LOST, "kitchen is gone", 0.5)

    told = [event for lost in (LOST, again) for at in range(3) for event in join.take(at, lost)]

    assert told == [LOST, again]


@pytest.mark.parametrize("event", [Resumable("ab", (4,)), Waiting("desk loads it")])
def test_what_only_one_point_tells_is_not_told(event: Event) -> None:
    assert [*Join(POINTS, TokenUsage()).take(0, event)] == []


def test_complete_points_are_shown_when_those_before_them_are() -> None:
    join = Join(POINTS, TokenUsage())
    shown = [text_of([*join.begin()])]

    for at in (2, 1, 0):
        events = [*join.take(at, Piece(f"text {at}")), *join.take(at, answer_of("", 1))]
        shown.append(text_of(events))

    assert shown == [
        "1. Parks", "", "", "\n\ntext 0\n\n2. Work\n\ntext 1\n\n3. Friends\n\ntext 2",
    ]  # fmt: skip


@given(st.data())
def test_any_order_gives_the_same_text_and_counts(data: st.DataObject) -> None:
    words = [["a ", "\n b"], [" c", " "], ["\n", "d", "\n\n", "e"]]
    turns = data.draw(st.permutations([at for at, each in enumerate(words) for _ in [*each, ""]]))
    join, events = Join(POINTS, TokenUsage(written=[7])), list[Event]()
    rest = [[*each] for each in words]

    events += join.begin()
    for at in turns:
        more = rest[at].pop(0) if rest[at] else None
        events += join.take(at, answer_of("", 2) if more is None else Piece(more, (at,)))

    answer = join.answer(0.5, 1.5)
    assert text_of(events) == answer.text
    assert answer.text == "1. Parks\n\na \n b\n\n2. Work\n\nc\n\n3. Friends\n\nd\n\ne"
    assert answer.tokens == (7, 0, 1, 0, 1, 0, 1)
    assert (answer.ttft_ms, answer.tokens_per_second) == (500.0, 6.0)
