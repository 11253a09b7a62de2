import pytest
from rich.cells import cell_len

from meshllm.cli.ring.picture import Box, drawable, line, picture


def boxes(count: int, name: str = "n{}") -> list[Box]:
    return [
        Box(name.format(at), f"{at}:{at + 1}", f"{at}.50 ms", f"{at}.25 ms") for at in range(count)
    ]


def test_a_ring_of_two_is_boxes_and_a_return_arrow() -> None:
    assert picture(boxes(2), 80).splitlines() == [
        "┌─────────┐         ┌─────────┐",
        "│ n0      │ 0.25 ms │ n1      │",
        "│ 0:1     │────────▶│ 1:2     │",
        "│ 0.50 ms │         │ 1.50 ms │",
        "└─────────┘         └─────────┘",
        "     ▲                   │",
        "     └───── 1.25 ms ─────┘",
    ]


def test_one_node_is_a_box() -> None:
    text = picture(boxes(1), 80)

    assert text.count("┌") == 1
    assert "▶" not in text
    assert "▲" not in text


def test_a_wide_ring_takes_two_rows() -> None:
    rows = picture(boxes(6), 60).splitlines()

    assert rows[2] == "│ 0:1     │────────▶│ 1:2     │────────▶│ 2:3     │"
    assert rows[5] == "     ▲ 5.25 ms                       2.25 ms │"
    assert rows[6] == "     │                                       ▼"
    assert rows[9] == "│ 5:6     │◀────────│ 4:5     │◀────────│ 3:4     │"


def test_the_arrow_of_an_odd_ring_goes_around_the_empty_slot() -> None:
    rows = picture(boxes(5), 60).splitlines()

    assert rows[7] == "     │              ┌─────────┐         ┌─────────┐"
    assert rows[9] == "     └──────────────│ 4:5     │◀────────│ 3:4     │"


@pytest.mark.parametrize("columns", [30, 80, 132])
@pytest.mark.parametrize("name", ["n{}", "a-very-long-name-of-a-node-{}", "東京{}"])
def test_no_line_is_wider_than_the_terminal(columns: int, name: str) -> None:
    texts = [picture(boxes(count, name[: columns // 3]), columns) for count in range(1, 20)]

    assert [max(map(cell_len, text.splitlines())) > columns for text in texts] == 19 * [False]


def test_every_node_is_in_the_picture() -> None:
    for count in range(1, 20):
        text = picture(boxes(count), 80)

        assert all(f"n{at} " in text for at in range(count))


def test_a_long_name_is_cut_and_a_wide_one_stays_aligned() -> None:
    rows = picture([*boxes(3, "a-very-long-name-{}"), *boxes(1, "東京都千代田区")], 80).splitlines()

    assert rows[1].startswith("│ a-very-l… │")
    assert len({cell_len(row) for row in rows[:5]}) == 1


def test_a_combining_character_takes_no_cell() -> None:
    rows = picture(boxes(1, "e\u0301te"), 80).splitlines()

    assert len({cell_len(row) for row in rows}) == 1
    assert "e\u0301te" in rows[1]


def test_many_nodes_are_a_line() -> None:
    assert line(boxes(3), 40).splitlines() == [
        "n0 0:1 ─0.25 ms─▶ n1 1:2 ─1.25 ms─▶",
        "  n2 2:3 ─2.25 ms─▶ n0",
    ]
    assert picture(boxes(9), 80) == line(boxes(9), 80)


@pytest.mark.parametrize("count", [1, 2])
def test_boxes_that_fit_in_no_row_are_a_line(count: int) -> None:
    few = boxes(count, "a-very-long-name-{}")

    assert picture(few, 12 * count) == line(few, 12 * count)


def test_a_line_needs_no_times() -> None:
    assert line([Box("a", "0:1", "", ""), Box("b", "1:2", "", "")], 80) == "a 0:1 ─▶ b 1:2 ─▶ a"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", None])
def test_an_encoding_without_boxes_gets_ascii(encoding: str | None) -> None:
    assert drawable(picture(boxes(2), 80), encoding).isascii()


def test_an_encoding_with_boxes_keeps_them() -> None:
    assert drawable("─▶", "utf-8") == "─▶"
