import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from meshllm.cli.app import COMMANDS, app, command_tree
from meshllm.cli.shared.deferred import _UNKNOWN, _kept
from tests.cli.conftest import Invoke

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
    ("words", "name"),
    [
        (("key", "revoke", "caf\udce9"), "NAME"),
        (("key", "create", "a", "--models", "x,caf\udce9"), "--models"),
        (("chat", "--stop", "a", "--stop", "caf\udce9", "hi"), "--stop"),
        (("ring", "remove", "caf\udce9"), "ID"),
        (("config", "unset", "caf\udce9"), "NAME"),
        (("relay", "--allow", "caf\udce9"), "--allow"),
    ],
)
def test_a_text_that_is_not_utf8_is_refused(
    meshllm: Invoke, words: tuple[str, ...], name: str
) -> None:
    result = meshllm(*words)

    assert result.exit_code == 2
    assert f"error: `{name}` is not UTF-8 at character " in result.stderr
    assert "\nhint: " in result.stderr


def test_a_path_may_have_any_bytes(meshllm: Invoke, home: Path) -> None:
    path = home / os.fsdecode(b"caf\xe9.json")
    path.write_text('{"type": "object"}')

    assert meshllm("chat", "--schema", str(path), "hi").exit_code == 0


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


def run(*words: str) -> tuple[str, set[str]]:
    """Run a command; return its output, and the modules that this imported."""
    code = """
        import json, sys
        from meshllm.cli.app import main
        try:
            main()
        finally:
            print(json.dumps(sorted(sys.modules)), file=sys.stderr)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout, set(json.loads(told.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "words",
    [
        ("node", "--model", "builtin", "--members", "2", "--no-discovery", "--print-service"),
        ("config", "show"),
        ("ring", "plan", "--help"),
    ],
)
def test_texts_flags_and_numbers_are_parsed_without_pydantic(words: tuple[str, ...]) -> None:
    told, imported = run(*words)

    assert told
    assert "meshllm.cli.app" in imported
    assert "pydantic" not in imported


def parameters(command: Any) -> Iterator[Any]:
    yield from command.params
    for each in getattr(command, "commands", {}).values():
        yield from parameters(each)


def test_values_that_are_kept_are_what_conversion_returns() -> None:
    values = None, True, False, "", "text", " 3 ", "3", "007", "-3", "0x3", "9" * 18, 3, 3.5, ()
    context, seen = typer.Context(typer.main.get_command(app)), set[object]()

    for parameter in parameters(command_tree()):
        for value in values:
            if (kept := _kept(parameter, value)) is not _UNKNOWN:
                found = parameter.get_runtime_param().coerce(value, parameter, context)
                assert (type(found), found) == (type(kept), kept), parameter.name
                seen.add(value)

    assert {None, True, "text", "007", 3} <= seen


def test_a_limit_holds_for_values_of_the_right_type() -> None:
    result = CliRunner().invoke(app, ["ring", "ticket", "--uses", "0"])

    assert result.exit_code == 2
    assert "less than 1" in result.stderr


def test_repeated_flags_are_counted() -> None:
    seen: list[dict[str, object]] = []
    tree = typer.main.get_command(app)
    tree.callback = lambda **values: seen.append(values)

    with pytest.raises(SystemExit):
        tree.main(["-vv", "--debug"])

    assert [(each["verbose"], each["debug"], each["version"]) for each in seen] == [
        (2, True, False)
    ]
