import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from meshllm.cli.app import COMMANDS, app, command_tree

TAB = """
import json, os, sys
os.environ.update(COMP_WORDS=sys.argv[1], COMP_CWORD=sys.argv[2])
os.environ["_MESHLLM_COMPLETE"] = "complete_bash"
sys.argv = ["meshllm"]
from meshllm.cli.app import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def press_tab(line: str) -> tuple[list[str], set[str]]:
    """Return what the shell is offered, and the modules that this imported."""
    words = str(len(line.split(" ")) - 1)
    code = [sys.executable, "-c", TAB, line, words]
    told = subprocess.run(code, capture_output=True, text=True, check=True)
    return told.stdout.split(), set(json.loads(told.stderr))


@pytest.mark.parametrize(
    ("line", "offered"),
    [("meshllm ch", "chat"), ("meshllm ", "config"), ("meshllm --v", "--verbose")],
)
def test_names_of_commands_complete_without_their_modules(line: str, offered: str) -> None:
    found, imported = press_tab(line)

    assert offered in found
    ours = {each for each in imported if each.startswith("meshllm.")}
    assert ours == {
        "meshllm.cli", "meshllm.cli.app", "meshllm.cli.shared", "meshllm.cli.shared.deferred",
        "meshllm.cli.terminal", "meshllm.cli.terminal.streams", "meshllm.errors",
    }  # fmt: skip
    assert "pydantic" not in imported


@pytest.mark.parametrize(
    ("line", "offered", "module"),
    [
        ("meshllm chat --out", "--outline", "chat.chat"),
        ("meshllm chat --nodes 3 --temp", "--temperature", "chat.chat"),
        ("meshllm chat --model buil", "builtin", "chat.chat"),
        ("meshllm ring pl", "plan", "ring.ring"),
        ("meshllm ring plan --wo", "--workload", "ring.plan"),
        ("meshllm help netw", "networking", "commands.help"),
    ],
)
def test_a_command_completes_without_the_others(line: str, offered: str, module: str) -> None:
    found, imported = press_tab(line)

    assert offered in found
    assert f"meshllm.cli.{module}" in imported
    assert {"meshllm.cli.doctor.doctor", "meshllm.cli.commands.relay", "pydantic"}.isdisjoint(
        imported
    )


def test_an_option_that_was_given_is_not_offered_again() -> None:
    found, _ = press_tab("meshllm chat --nodes 3 --no")

    assert "--nodes" not in found


def test_summaries_are_those_of_the_commands() -> None:
    tree = command_tree()

    told = {name: str(each.help).partition("\n")[0] for name, each in tree.commands.items()}
    assert told == {name: summary for name, _, summary in COMMANDS}


def test_values_are_converted_when_a_command_runs() -> None:
    result = CliRunner().invoke(app, ["chat", "--nodes", "x"])

    assert result.exit_code == 2
    assert "not a whole number" in result.stderr


def test_repeated_flags_are_counted() -> None:
    seen: list[dict[str, object]] = []
    tree = typer.main.get_command(app)
    tree.callback = lambda **values: seen.append(values)

    with pytest.raises(SystemExit):
        tree.main(["-vv", "--debug"])

    assert [(each["verbose"], each["debug"], each["version"]) for each in seen] == [
        (2, True, False)
    ]
