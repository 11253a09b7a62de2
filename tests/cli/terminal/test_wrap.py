import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.cli.terminal.wrap import LONGEST, Wrap, width_of


def _wrapped(text: str, columns: int, size: int = 3) -> str:
    wrap = Wrap(columns)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(map(wrap.feed, pieces)) + wrap.flush()


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_line_breaks_between_words(size: int) -> None:
    assert _wrapped("one two three four", 9, size) == "one two \nthree \nfour"


def test_a_newline_begins_a_line() -> None:
    assert _wrapped("one two\nthree four", 10) == "one two\nthree four"


def test_a_word_is_held_back_until_it_ends() -> None:
    wrap = Wrap(20)

    shown = [wrap.feed(piece) for piece in ("hel", "lo ", "wor", "ld")]

    assert [*shown, wrap.flush()] == ["", "hello ", "", "", "world"]


def test_a_long_word_is_shown_in_pieces() -> None:
    assert Wrap(20).feed("x" * (LONGEST + 1)) == "x" * (LONGEST + 1)


def test_scripts_without_spaces_stream() -> None:
    assert Wrap(5).feed("日本語") == "日本\n語"


@pytest.mark.parametrize(
    ("text", "columns"), [("ที่นี่", 2), ("e\u0301", 1), ("日本", 4), ("a\u200db", 2), ("שָׁלוֹם", 4)]
)
def test_marks_take_no_column(text: str, columns: int) -> None:
    assert width_of(text) == columns
    assert _wrapped(f"{text} {text}", 2 * columns + 1) == f"{text} {text}"


@given(st.text(alphabet=st.sampled_from("ab \n日🦊\t")), st.integers(4, 20), st.integers(1, 5))
def test_nothing_is_lost_but_lines_are_broken(text: str, columns: int, size: int) -> None:
    wrapped = _wrapped(text, columns, size)

    assert wrapped.replace("\n", "") == text.replace("\n", "")
    assert wrapped.count("\n") >= text.count("\n")
