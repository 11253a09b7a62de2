import pytest

from meshllm.cli.commands.help import summary, topics
from meshllm.cli.terminal.render import out
from tests.cli.conftest import Invoke


def test_alone_it_lists_commands_and_topics(meshllm: Invoke) -> None:
    result = meshllm("help")

    assert result.exit_code == 0
    assert "  chat " in result.stdout
    for name, page in topics().items():
        assert f"  {name:12} {summary(page)}\n" in result.stdout


@pytest.mark.parametrize("words", [("chat",), ("ring", "plan"), ("ring",)])
def test_the_help_of_a_command_is_that_of_its_flag(meshllm: Invoke, words: tuple[str, ...]) -> None:
    assert meshllm("help", *words).stdout == meshllm(*words, "--help").stdout


def test_a_pipe_gets_the_page_as_it_is(meshllm: Invoke) -> None:
    assert meshllm("help", "networking").stdout == topics()["networking"]


@pytest.mark.parametrize("pager", [None, "/usr/bin/less"])
def test_a_terminal_gets_a_formatted_page(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, pager: str | None
) -> None:
    monkeypatch.setattr("meshllm.cli.commands.help.shutil.which", lambda _: pager)
    monkeypatch.setattr("pydoc.pager", out)
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    monkeypatch.setenv("LESS", "-R")

    shown = meshllm("help", "security").stdout

    assert "Joining: tickets" in shown
    assert "## " not in shown


def test_an_unknown_topic_lists_the_known_ones(meshllm: Invoke) -> None:
    result = meshllm("help", "dragons")

    assert result.exit_code == 2
    assert "No help on `dragons`" in result.stderr
    assert "`concepts`, `networking`" in result.stderr


def test_a_mistyped_topic_is_corrected(meshllm: Invoke) -> None:
    result = meshllm("help", "concept")

    assert result.exit_code == 2
    assert result.stderr.endswith("hint: did you mean `meshllm help concepts`?\n")
