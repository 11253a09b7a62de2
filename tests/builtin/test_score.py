"""The held-out file is valid, the checks are fair, and the shipped model reaches its score."""

import json
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.builtin.score import (
    WEIGHTS,
    Case,
    Message,
    Result,
    as_json,
    converse,
    evaluate,
    greedy,
    load,
    passes,
    rates,
    render,
)

CASES = load()
MIN_SCORE = 0.80  # of all cases; the minimum of a builtin model that is shipped
COUNTS = {
    "meshllm": 160,
    "story": 40,
    "arithmetic": 60,
    "copy": 35,
    "recall": 60,
    "refusal": 45,
}
BY_ID = {case.id: case for case in CASES}


def make(**changes: object) -> Case:
    fields: dict[str, object] = {
        "id": "x",
        "category": "meshllm",
        "turns": ["how do I leave?"],
        "expect": ["/bye|ctrl-d"],
        "ideal": "/bye",
    }
    return Case(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed values


def test_file_has_the_agreed_counts() -> None:
    assert Counter(case.category for case in CASES) == COUNTS
    assert len(BY_ID) == len(CASES) == 400


def test_no_conversation_is_asked_twice() -> None:
    assert len({tuple(case.turns) for case in CASES}) == len(CASES)


def test_every_case_is_complete() -> None:
    for case in CASES:
        assert case.turns, case.id
        assert all(turn.strip() for turn in case.turns), case.id
        assert case.expect, case.id
        assert case.id.startswith(f"{case.category}-"), case.id
        assert (case.category == "story") == (case.min_words >= 25), case.id
        assert (case.category == "recall") == (len(case.turns) > 1), case.id


def test_expressions_compile() -> None:
    for case in CASES:
        for pattern in case.expect + case.forbid:
            assert re.compile(pattern), case.id


def test_every_case_accepts_its_ideal() -> None:
    assert [case.id for case in CASES if not passes(case, case.ideal)] == []


def test_an_empty_answer_fails() -> None:
    assert [case.id for case in CASES if passes(case, "")] == []


def test_an_echo_of_the_question_fails() -> None:
    asked = [case for case in CASES if not case.id.startswith("refusal-small-talk")]

    assert [case.id for case in asked if passes(case, case.turns[-1])] == []


@pytest.mark.parametrize(
    ("case_id", "answer", "verdict"),
    [
        ("arithmetic-plain-sum", "7 + 5 = 12", True),
        ("arithmetic-plain-sum", "It is twelve.", True),
        ("arithmetic-plain-sum", "7 + 5 = 122", False),
        ("arithmetic-plain-sum", "12.5", False),
        ("arithmetic-plain-sum", "-12", False),
        ("arithmetic-number-words-sum", "**13**", True),
        ("arithmetic-bigger", "23 is bigger than 17.", True),
        ("arithmetic-bigger", "17 is bigger than 23.", False),
        ("copy-sort-order", "ant cat dog", True),
        ("copy-sort-order", "Sure! Here they are: ant, cat, and dog.", True),
        ("copy-sort-order", "The right order is ant, cat, dog", True),
        ("copy-sort-order", "1. ant\n2. cat\n3. dog", True),
        ("copy-sort-order", "cat, ant, dog", False),
        ("copy-sort-order", "ant, cat, dog, fox", False),
        ("copy-sort-order", "ant, cat, dogs", False),
        ("copy-sort-order", "ape, ant, cat, dog", False),
        ("copy-say-quoted", '"Good night, moon!"', True),
        ("meshllm-repl-bye", "Press Ctrl+D", True),
        ("meshllm-exit-130", "It is 1301", False),
        ("meshllm-network", "Not yet.", False),
        ("recall-corrected-name", "Your name is Ana.", False),
        ("refusal-weather", "I don\N{RIGHT SINGLE QUOTATION MARK}t know that.", True),
        ("refusal-weather", "It will be sunny.", False),
        ("story-fox", "A fox.", False),
        ("story-fox", "The bear ate honey all day long. " * 5, False),
    ],
)
def test_verdicts(case_id: str, answer: str, verdict: bool) -> None:
    assert passes(BY_ID[case_id], answer) is verdict


def test_every_group_must_match_and_no_forbidden_one() -> None:
    case = make(expect=["layer", "range|from .* to"], forbid=["^no"])
    assert passes(case, "LAYERS from 3\nup to 5")
    assert not passes(case, "layers")
    assert not passes(case, "No: layers from 3 to 5")


def test_own_answers_go_between_the_turns() -> None:
    seen: list[list[Message]] = []

    def reply(messages: Sequence[Message]) -> str:
        seen.append([dict(message) for message in messages])
        return f"answer {len(seen)}"

    assert converse(["one", "two"], reply) == "answer 2"
    assert [message["content"] for message in seen[1]] == ["one", "answer 1", "two"]
    assert [message["role"] for message in seen[1]] == ["user", "assistant", "user"]


def test_report_counts_per_category_and_names_failures() -> None:
    cases = [make(id="good", turns=["/bye"]), make(id="bad", category="story", turns=["hm"])]
    results = evaluate(cases, lambda messages: messages[-1]["content"])
    assert rates(results) == {"meshllm": (1, 1), "story": (0, 1), "total": (1, 2)}
    assert "bad: hm" in render(results, verbose=True)
    assert "bad" not in render(results, verbose=False)
    assert "50.0%" in render(results, verbose=False)
    report = json.loads(as_json(results))
    assert report["scores"]["total"] == {"passed": 1, "asked": 2}
    assert [failure["id"] for failure in report["failures"]] == ["bad"]


def test_an_empty_report_does_not_divide_by_zero() -> None:
    none: list[Result] = []
    assert "0.0%" in render(none, verbose=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_builtin_model_reaches_its_score() -> None:
    results = evaluate(CASES, greedy(WEIGHTS))
    passed, asked = rates(results)["total"]
    assert passed / asked >= MIN_SCORE, "\n" + render(results, verbose=True)
