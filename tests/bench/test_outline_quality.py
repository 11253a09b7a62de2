from tests.bench.outline_quality import Row, directive, lay_out, listed, parts
from tests.builtin.score import Case

CASES = [Case(name, "any", [f"what is {name}?"], ["."], "x") for name in ("a", "b")]


def test_a_list_has_a_question_in_each_line() -> None:
    assert listed(CASES) == "Answer each of these:\n1. what is a?\n2. what is b?"


def test_each_question_is_a_point_and_asked_as_it_is() -> None:
    found = directive(CASES)

    points = found.read("whatever", 8)
    assert [found.expand(point, 9) for point in points] == ["what is a?", "what is b?"]
    assert found.outline(8, may_decline=False) == ""


def test_an_answer_is_split_into_the_texts_of_its_points() -> None:
    text = "1. what is a?\n\nIt is\n\na.\n\n2. what is b?\n\n3. what is c?\n\nc"

    assert parts(text, 3) == ["It is\n\na.", "", "c"]


def test_a_row_is_a_line_of_the_table() -> None:
    assert lay_out([Row("by outline", 9, 40)]).split() == ["by", "outline", "9", "of", "40"]
