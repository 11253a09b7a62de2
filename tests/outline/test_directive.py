import re

import pytest

from meshllm.outline.directive import DIRECTIVES, Directive, directive_for
from meshllm.outline.points import Point, declines, read_points


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Compare cats and dogs", "comparison"),
        ("Cats vs. dogs?", "comparison"),
        ("How do I grow tomatoes?", "instructions"),
        ("What makes a city worth living in?", "general"),
        ("", "general"),
    ],
)
def test_the_task_is_found_in_the_question(question: str, name: str) -> None:
    assert directive_for(question).name == name


@pytest.mark.parametrize("directive", DIRECTIVES, ids=lambda each: each.name)
def test_what_a_directive_asks_for_is_what_is_read(directive: Directive) -> None:
    text = directive.outline(6, may_decline=True)

    assert "2 to 6 lines" in text
    assert directive.read("1. Title\n2. Other\n3. Third", 2) == read_points("1. Title\n2. Other", 2)
    assert declines("NONE\n")
    assert "write only NONE" in " ".join(text.split())


def test_a_directive_of_others_has_texts_and_points_of_its_own() -> None:
    mine = Directive(
        "mine",
        re.compile("cat"),
        "cats",
        read=lambda text, _: [Point(1, text)],
        outline_text="List {points}.",
        expand_text="{number} {title} {words}",
    )

    found = directive_for("a cat", (mine, *DIRECTIVES))

    assert found.outline(4, may_decline=False) == "List cats."
    assert found.expand(Point(3, "{x}"), 40) == "3 {x} 40"
