"""A table of turns that a reader stumbles over, and what to write instead; no linter of taste."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = (
    "meshllm", "plugins", "tests", "man", "completions", ".github", "README.md", "CHANGELOG.md",
    "pyproject.toml", ".justfile",
)  # fmt: skip
SUFFIXES = {".py", ".md", ".toml", ".js", ".html", ".css", ".svg", ".1", ".7", ".bash", ".fish", ""}
CORPORA = ROOT / "tests" / "builtin"  # what the demonstration model was trained and is tested on

INSTEAD = {
    r"(?<!there )(?<!this )\bis no (?!longer|more)": "`invalid`, `not a`, `cannot`",
    r"\bfor ever\b": "`permanently`, `without end`",
    r"\bwhoever\b": "`the one that`, or name it",
    r"\bwhat is late\b": "`late results`",
    r"(?<!\bsuch )\bas of (?!now)": "`of`, `as in`, `like`",
    r"\bknows nothing about\b": "what it holds; a contract says what it does not import",
    r"\banew\b": "`again`, `new`",
    r"\bit is over\b": "`it has ended`, `expired`",
    r"\bof its own accord\b": "`by itself`",
    r"\bhung up\b": "`closed the connection`",
}


@cache
def texts() -> dict[Path, list[str]]:
    """Read all lines, by file; the words of a name are separated as those of a sentence."""
    found = [
        path
        for place in PLACES
        for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    ]
    return {
        path: path.read_text("utf-8").replace("_", " ").splitlines()
        for path in found
        if path.is_file()
        and path.suffix in SUFFIXES
        and CORPORA not in path.parents
        and path != Path(__file__)
        and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("turn", INSTEAD)
def test_no_text_has_a_turn_of_the_table(turn: str) -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, lines in texts().items()
        for number, line in enumerate(lines, start=1)
        if re.search(turn, line, re.IGNORECASE)
    ]

    assert hits == [], f"write {INSTEAD[turn]}"


def test_the_table_finds_what_it_forbids() -> None:
    worst = "What is late it computes anew, for ever; whoever asks is told that `x` is no span"

    assert sum(bool(re.search(turn, worst, re.IGNORECASE)) for turn in INSTEAD) == 5
