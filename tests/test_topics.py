"""README and the pages of section 7 name commands, options, settings and benchmarks that exist."""

import re
import shlex
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from meshllm.cli.app import command_tree
from meshllm.cli.commands.help import topics
from meshllm.config import keys
from meshllm.model.modules.kernel_choice import LinearKernel
from meshllm.model.steps.execution import _LINEARS, Strategy
from tests.security.__main__ import ATTACKS

ROOT = Path(__file__).parents[1]
TEXTS = {"README": (ROOT / "README.md").read_text("utf-8"), **topics()}
TREE = command_tree()
OTHERS = {"--unix-socket", "--help", "--interrupt_requests"}  # of curl; every command; an engine


def code(text: str) -> str:
    """Join what is written as code: fences and spans."""
    fences = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*fences, *(" ".join(span.split()) for span in spans)])


def commands(tree: Any, prefix: str = "meshllm") -> dict[str, Any]:
    found = {prefix: tree}
    for name, child in getattr(tree, "commands", {}).items():
        found |= commands(child, f"{prefix} {name}")
    return found


def lines(text: str) -> Iterator[list[str]]:
    """Yield the arguments of the command in each line of a script that calls it."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.search(r"(?:^|[|;&] )\s*(?:\.venv/bin/)?meshllm(?: (.*)|$)", line):
            words = shlex.shlex(found[1] or "", posix=True, punctuation_chars="|<>;&")
            words.whitespace_split = True
            yield list(takewhile(lambda word: not set(word) <= set("|<>;&"), words))


def parse(words: Sequence[str]) -> str:
    """Parse arguments as the command line does; return the command."""
    context: Any = None
    command: Any = TREE
    name, rest = "meshllm", list(words)
    while True:
        context = command.make_context(name, rest, parent=context)
        rest = [*context._protected_args, *context.args]
        if not (rest and hasattr(command, "resolve_command")):
            return str(context.command_path)
        name, command, rest = command.resolve_command(context, rest)


def options_of_benchmarks(text: str) -> set[str]:
    """Find the options of the benchmarks that a text names, in their sources."""
    sources = [
        Path(spec.origin).read_text("utf-8")
        for name in re.findall(r"python -m (tests[\w.]+)", text)
        if (spec := find_spec(name)) and spec.origin
    ]
    return {option for source in sources for option in re.findall(r'"(--[\w-]+)"', source)}


@pytest.mark.parametrize("name", TEXTS)
def test_every_option_exists(name: str) -> None:
    text = code(TEXTS[name])
    known = {option for each in commands(TREE).values() for p in each.params for option in p.opts}

    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))

    assert named - known - options_of_benchmarks(text) - OTHERS == set()


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_exists(name: str) -> None:
    known = commands(TREE)

    for words in re.findall(r"(?m)^(?:\.venv/bin/)?meshllm((?: [a-z]+)+)", code(TEXTS[name])):
        first, *rest = words.split()
        assert f"meshllm {first}" in known, words
        if rest and f"meshllm {first} {rest[0]}" not in known:
            assert not getattr(known[f"meshllm {first}"], "commands", {}), words


@pytest.mark.parametrize("name", ["README", "networking"])
def test_every_line_of_a_script_is_a_command_line(name: str) -> None:
    scripts = re.findall(r"```\w*\n(.*?)```", TEXTS[name], re.DOTALL)

    found = [words for script in scripts for words in lines(script)]

    assert len(found) == sum(script.count("meshllm ") for script in scripts)
    for words in found:
        assert parse(words).startswith("meshllm"), words


def test_every_example_of_a_command_is_a_command_line() -> None:
    texts = [str(command.epilog) for command in commands(TREE).values()]

    found = [*lines("\n".join(line.strip() for text in texts for line in text.splitlines()))]

    assert len(found) > len(texts)
    for words in found:
        assert parse(words).startswith("meshllm "), words


@pytest.mark.parametrize("line", ["node --nam x", "ring removed x", "key create", "chat -n two"])
def test_what_the_command_line_refuses_is_not_an_example(line: str) -> None:
    with pytest.raises(Exception, match=r"No such|Missing|valid integer"):
        parse(line.split())


@pytest.mark.parametrize("name", TEXTS)
def test_every_module_and_variable_exists(name: str) -> None:
    text = code(TEXTS[name])
    variables = {key.variable for key in keys().values()}

    assert set(re.findall(r"\bMESHLLM_\w+", text)) <= variables
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert module == "venv" or find_spec(module), module


@pytest.mark.parametrize("name", topics())
def test_a_page_names_itself_and_fits_a_terminal(name: str) -> None:
    assert TEXTS[name].startswith(f"# meshllm-{name}: ")
    assert max(map(len, TEXTS[name].splitlines())) <= 100


def test_the_threat_model_names_files_with_tests_and_attacks_that_run() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", TEXTS["security"]))

    for file in named:
        text = (ROOT / file).read_text("utf-8")
        assert "def test_" in text or "ATTACKS = (" in text, file
    modules = {
        path.name
        for path in (ROOT / "tests/security").glob("*.py")
        if "ATTACKS = (" in path.read_text("utf-8")
    }
    assert modules == {Path(file).name for file in named if file.startswith("tests/security/")}


def test_every_attack_is_named_by_subject_and_every_name_is_an_attack() -> None:
    section = TEXTS["security"].partition("## Attacks as tests")[2].partition("What holds")[0]
    plain = " ".join(section.split())
    subjects = re.findall(r"- \*[^*]+\*(.*?)(?= - \*|$)", plain)
    named = [
        (wide or short).strip()
        for wide, short in re.findall(r"``(.+?)``|`([^`]+)`", " ".join(subjects))
    ]
    attacks = [name for name in named if not name.startswith("tests/")]

    assert len(subjects) == 14
    assert all(re.search(r"`tests/\S+\.py`|`[^`]+`", each) for each in subjects)
    assert sorted(attacks) == sorted(attack.name for attack in ATTACKS)


def test_every_word_for_how_a_node_computes_is_explained() -> None:
    words = {*Strategy, *LinearKernel, *_LINEARS.values()}

    rows = re.findall(r"^\| `(.*)` \|", topics()["performance"], re.MULTILINE)

    assert {str(word) for word in words} <= set(rows)


def test_the_help_of_the_root_cuts_no_line_and_names_the_pages() -> None:
    text = TREE.get_help(typer.Context(TREE, info_name="meshllm"))
    words = " ".join(text.split())

    assert not re.findall(r"^  \w.*\.\.\.$", text, re.MULTILINE)
    assert "`meshllm help concepts`" in words
