import pytest

from tests.bench.outline import Recorded, Row, lay_out, numbers


def test_a_recorded_text_is_drafted_with_a_share_of_wrong_tokens() -> None:
    recorded = Recorded()
    recorded.keep((1, 2, 3, 9, 9))
    recorded.keep(tuple(range(100, 400)))
    recorded.acceptance = 0.5
    recorded.keep((100, 101, 102, 0))  # not while drafting

    drafter = recorded.begin()
    drafter.extend((100, 101, 102))
    drafts = drafter.draft(1000)

    right = sum(draft == token for draft, token in zip(drafts, range(103, 400), strict=True))
    assert drafter.look() is not None
    assert right / len(drafts) == pytest.approx(0.5, abs=0.1)


def test_nothing_is_drafted_while_recording_and_of_an_unknown_text() -> None:
    recorded = Recorded()
    recorded.keep((1, 2, 3))

    for acceptance, prompt in ((None, (1, 2)), (1.0, (7, 8))):
        recorded.acceptance = acceptance
        drafter = recorded.begin()
        drafter.extend(prompt)
        assert (drafter.look(), drafter.draft(4)) == (None, ())


def test_a_row_is_a_line_of_the_table() -> None:
    lines = lay_out([Row(100.0, 0.5, 51.5, 18.4, 2.81, 5.8, 2.01, 1.98)]).splitlines()

    assert lines[1].split() == ["100", "0.5", "2.01", "1.98", "51.5", "18.4", "5.8", "2.81x"]
    assert numbers("0,100") == (0.0, 100.0)
