import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.outline.points import (
    MAX_TITLE_CHARS,
    Point,
    declines,
    is_independent,
    read_points,
)


@pytest.mark.parametrize(
    "text",
    [
        "1. Parks\n2. Work",
        "Here it is:\n\n1. Parks\n   - trees\n2. Work\n\nThat is all.",
        "**1. Parks**\n**2. Work**",
        "- 1) *Parks*\r\n- 2) Work:",
        "## 1. Parks\n## 2. Work",
        "1: Parks\n2: Work",
        "1. Parks\n1. Again\n3. Jump\n2. Work",
    ],
)
def test_points_are_read_however_they_are_written(text: str) -> None:
    assert read_points(text, 8) == [Point(1, "Parks"), Point(2, "Work")]


@pytest.mark.parametrize("text", ["", "NONE", "A city needs parks.", "1.\n2.", "1. **\n"])
def test_other_text_has_no_points(text: str) -> None:
    assert read_points(text, 8) == []


def test_points_beyond_the_limit_are_not_read() -> None:
    text = "".join(f"{number}. Point\n" for number in range(1, 20))

    assert [each.number for each in read_points(text, 3)] == [1, 2, 3]


def test_a_title_is_one_line_of_printable_text() -> None:
    [point] = read_points("1. a\tb\x1b[2J\u202ec  d" + "x" * 1000, 8)

    assert point.title.startswith("a b [2J c d")
    assert point.title.isprintable()
    assert len(point.title) == MAX_TITLE_CHARS


@given(st.text(alphabet=st.sampled_from("12 .):*#-_\n\r\x00\u2028ab")), st.integers(0, 9))
def test_any_text_can_be_read(text: str, most: int) -> None:
    points = read_points(text, most)

    assert [each.number for each in points] == [*range(1, len(points) + 1)]
    assert len(points) <= most
    assert all(each.title and each.title.isprintable() for each in points)


@pytest.mark.parametrize(
    ("text", "is_declined"),
    [
        ("", False),
        ("NO", False),
        ("1", False),
        ("\n1. Parks\n", False),
        ("NONE\n", True),
        ("A city needs\n1. Parks", True),
    ],
)
def test_a_first_line_that_is_not_a_point_declines(text: str, is_declined: bool) -> None:
    assert declines(text) is is_declined


@pytest.mark.parametrize(
    ("titles", "are_independent"),
    [
        (("Parks", "Work"), True),
        (("Parks", "Then work"), False),
        (("Step one", "Work"), False),
        (("Parks", "Conclusion"), False),
        (("x = 2", "Work"), False),
        (("`main`", "Work"), False),
    ],
)
def test_points_that_refer_to_others_are_not_independent(
    titles: tuple[str, ...], are_independent: bool
) -> None:
    points = [Point(place, title) for place, title in enumerate(titles, start=1)]

    assert is_independent(points) is are_independent
