"""`transport list`, `config show` and `bench`: parse, call one function, render."""

import json
from pathlib import Path

import pytest

from meshllm.testing import table1
from meshllm.testing.table1 import Case, Row
from tests.cli.conftest import Invoke

ROWS = [
    Row("transformers", 100.0, 20.0, 50.0, 1.0, 0.5, 1.0, 0.0),
    Row("ring of 1", 50.0, 10.0, 100.0, 2.0, 1.0, 0.5, 2.5),
]


def test_transports_are_listed_with_their_distribution(meshllm: Invoke) -> None:
    text = meshllm("transport", "list").stdout
    offers = json.loads(meshllm("transport", "list", "--json").stdout)["transports"]

    assert "loopback   meshllm" in text
    assert "loopback" in [offer["name"] for offer in offers]


def test_config_shows_values_and_meanings(meshllm: Invoke) -> None:
    lines = meshllm("config", "show").stdout.splitlines()

    assert lines[0].split() == ["setting", "value", "meaning"]
    assert "nodes               1         Nodes of the ring, all in this process." in lines


def test_config_shows_origins(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (home / "meshllm.toml").write_text("seed = 7")
    monkeypatch.setenv("MESHLLM_NODES", "3")

    lines = [line.split() for line in meshllm("config", "show", "--origin").stdout.splitlines()]
    shown = json.loads(meshllm("config", "show", "--json").stdout)

    assert ["nodes", "3", "MESHLLM_NODES"] in lines
    assert ["seed", "7", str(home / "meshllm.toml")] in lines
    assert ["model", "builtin", "default"] in lines
    assert {"name": "nodes", "value": 3, "origin": "MESHLLM_NODES"} in shown["settings"]
    assert shown["files"][-1] == str(home / "meshllm.toml")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """What was measured; the figures are always the same."""
    cases: list[Case] = []

    def measure(case: Case, _: object) -> list[Row]:
        cases.append(case)
        return ROWS

    monkeypatch.setattr(table1, "measure", measure)
    return cases


def test_bench_measures_what_is_asked(meshllm: Invoke, cases: list[Case]) -> None:
    words = "--model tiny --nodes 3,1,1 --prompt-tokens 8 --new-tokens 4 --rounds 2 --threads 1"

    text = meshllm("bench", *words.split()).stdout

    assert cases == [Case("tiny", (1, 3), 8, 4, 2, 1)]
    assert text.splitlines()[2].split() == [
        "ring", "of", "1", "50.00", "10.00", "100.00", "2.00", "1.00", "0.50", "2.50",
    ]  # fmt: skip


@pytest.mark.usefixtures("cases")
def test_bench_json_goes_to_stdout_or_a_file(meshllm: Invoke, home: Path) -> None:
    to_stdout = meshllm("bench", "--json", "-").stdout
    to_file = meshllm("bench", "--json", "table.json").stdout

    table = json.loads(to_stdout)
    assert (table["schema"], table["model"], table["rows"][1]["decode_ratio"]) == (
        1, "qwen3-0.6b", 2.0,
    )  # fmt: skip
    assert table["machine"]["cores"] >= 1
    assert json.loads((home / "table.json").read_text()) == table
    assert "ring of 1" in to_file


@pytest.mark.usefixtures("cases")
def test_bench_says_when_a_file_cannot_be_written(meshllm: Invoke) -> None:
    result = meshllm("bench", "--json", "no/such/folder.json")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: `no/such/folder.json` cannot be written")


@pytest.mark.parametrize("nodes", ["", "1,", "two", "0", "1;2", "-1"])
def test_bench_refuses_what_is_no_list_of_sizes(
    meshllm: Invoke, cases: list[Case], nodes: str
) -> None:
    result = meshllm("bench", "--nodes", nodes)

    assert (result.exit_code, cases) == (2, [])
