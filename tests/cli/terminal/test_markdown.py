"""Markdown on a terminal: what is shown in the end, whatever the pieces."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.cli.terminal.markdown import MarkdownStream

TEXT = """\
A *ring* holds `layers`.

Plain words only.

1. first
2. **second**

```python
x = 1

y = 2
```
The end of `it`"""


def shown(pieces: list[str], columns: int = 40, rows: int = 20) -> list[str]:
    """Play what is written on a terminal without colours; return its lines."""
    stream = MarkdownStream(columns, rows)
    return play("".join([*map(stream.feed, pieces), stream.flush()]), columns)


def play(written: str, columns: int) -> list[str]:
    """Return the lines of a terminal: text, line ends, cursor up, return, and erase below."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|.|\n", written):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token[0] == "\x1b":
            row -= int(token[2:-1])
            assert row >= 0
        elif token == "\x1b[J":
            assert column == 0
            del lines[row:]
            lines.append("")
        elif token[0] != "\x1b":
            if column == columns:
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            lines[row] = lines[row][:column] + token
            column += 1
    return [line.rstrip() for line in lines]


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def test_blocks_are_replaced_by_their_rendering() -> None:
    lines = shown([TEXT])

    assert lines[0] == "A ring holds layers."
    assert lines[2] == "Plain words only."
    assert [line.strip() for line in lines[4:6]] == ["1 first", "2 second"]
    code = [line.strip() for line in lines]
    assert code[code.index("x = 1") :][:3] == ["x = 1", "", "y = 2"]
    assert lines[-1] == "The end of it"
    assert not any("`" in line or "*" in line for line in lines)


@pytest.mark.parametrize("size", [1, 2, 7, 50])
@pytest.mark.parametrize("columns", [12, 20, 80])
def test_what_is_shown_does_not_depend_on_the_pieces(size: int, columns: int) -> None:
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]

    assert shown(pieces, columns) == shown([TEXT], columns)


def test_text_is_shown_before_its_block_is_complete() -> None:
    stream = MarkdownStream(40, 20)

    assert stream.feed("A *ring* holds ") == "A *ring* holds "


def test_text_without_markup_is_written_once() -> None:
    stream = MarkdownStream(40, 20)

    assert stream.feed("Plain words.\n\nMore.\n") + stream.flush() == "Plain words.\n\nMore.\n"


def test_a_block_higher_than_the_terminal_stays() -> None:
    code = "```\n" + "x\n" * 9 + "```\n"
    stream = MarkdownStream(40, 10)

    assert stream.feed(code) == code


def test_an_empty_line_within_code_does_not_end_it() -> None:
    stream = MarkdownStream(40, 20)

    assert "\x1b" not in stream.feed("````\na\n\n```\n\nb\n")
    assert "\x1b[J" in stream.feed("````\n")


@pytest.mark.parametrize(
    "text", ["*a* &#27;[2J&#155;2J", "`x` &#x1b;]52;c;aGk=&#7;", "*a* &#8238;b"]
)
def test_character_references_do_not_become_control_characters(text: str) -> None:
    stream = MarkdownStream(60, 20)

    written = stream.feed(f"{text}\n\n")

    rendered = re.sub(r"\x1b\[(?:\d*[AJ]|[\d;]*m)", "", written.partition("\x1b[J")[2])
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", rendered)


def test_a_link_shows_its_address() -> None:
    assert "https://evil.example" in " ".join(shown(["[bank](https://evil.example)\n\n"], 80))


@given(st.text(st.sampled_from("ab *`#-\n1.>|~[]()&;\t界"), max_size=60), st.integers(8, 40))
def test_any_text_can_be_shown(text: str, columns: int) -> None:
    stream = MarkdownStream(columns, 50)
    for char in text:
        stream.feed(char)
    stream.flush()
