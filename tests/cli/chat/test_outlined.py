import json

import pytest
from typer.testing import CliRunner, Result

from meshllm.cli.app import app
from tests.builders.writer import Writer

WHOLE = "1. Parks\n\ntext of 1\n\n2. Work\n\ntext of 2\n\n3. Friends\n\ntext of 3"


@pytest.fixture
def writer() -> Writer:
    return Writer()


def chat(writer: Writer, *words: str) -> Result:
    return CliRunner().invoke(app, ["chat", *words], obj=writer, prog_name="meshllm")


@pytest.mark.parametrize("flag", ["--outline", "--outline=on", "--outline=auto"])
def test_an_answer_is_outlined(writer: Writer, flag: str) -> None:
    result = chat(writer, flag, "What makes a city worth living in?")

    assert (result.exit_code, result.stdout, result.stderr) == (0, WHOLE + "\n", "")


def test_no_answer_is_outlined_unless_asked(writer: Writer) -> None:
    chat(writer, "What makes a city worth living in?")

    assert [each.turns[-1]["content"] for each in writer.requests] == [
        "What makes a city worth living in?"
    ]


def test_the_flag_takes_no_value_without_an_equals_sign(writer: Writer) -> None:
    chat(writer, "--outline", "auto")
    chat(other := Writer(), "--", "--outline")

    assert writer.requests[0].turns[-1]["content"].startswith("auto\n\nFirst write only an outline")
    assert other.requests[0].turns[-1]["content"] == "--outline"


def test_json_has_the_whole_answer(writer: Writer) -> None:
    result = chat(writer, "--outline", "--json", "--seed", "7", "What makes a city?")

    answer = json.loads(result.stdout)
    assert (answer["text"], answer["seed"], answer["prompt_tokens"]) == (WHOLE, 7, 40)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--outline=maybe", "hi"), "Invalid value `maybe` for `--outline`"),
        (("--outline=", "hi"), "Invalid value `` for `--outline`"),
        (("--outline", "--raw", "hi"), "`outline` cannot be combined with `raw`"),
        (("--outline", "--stop", "END", "hi"), "`outline` cannot be combined with `stop`"),
        (("--outline", "--stop", "END"), "`outline` cannot be combined with `stop`"),
        (
            ("--outline", "--max-tokens", "9", "hi"),
            "`outline` needs `max_tokens` of at least 128, not 9",
        ),
    ],
)
def test_what_cannot_be_outlined_is_refused(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("meshllm.cli.chat.chat.read_prompt", lambda prompt, _, waits: prompt)

    result = chat(writer, *words)

    assert (result.exit_code, result.stdout, writer.requests) == (2, "", [])
    assert result.stderr.startswith(f"error: {message}\n")
