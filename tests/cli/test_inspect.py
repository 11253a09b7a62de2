"""`transport list` and `config show`: parse, call one function, render."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke


def test_transports_are_listed_with_their_distribution(meshllm: Invoke) -> None:
    text = meshllm("transport", "list").stdout
    offers = json.loads(meshllm("transport", "list", "--json").stdout)["transports"]

    assert "loopback   meshllm" in text
    assert "loopback" in [offer["name"] for offer in offers]


def test_config_shows_values_and_meanings(meshllm: Invoke) -> None:
    lines = meshllm("config", "show").stdout.splitlines()

    assert lines[0].split() == ["setting", "value", "meaning"]
    rows = [" ".join(line.split()) for line in lines]
    assert "nodes 1 Number of ring nodes, all in this process." in rows
    assert "temperature the model's Sampling temperature; 0 is greedy." in rows


def test_config_shows_one_setting(meshllm: Invoke) -> None:
    one, as_json = meshllm("config", "show", "top-p"), meshllm("config", "show", "seed", "--json")
    unknown = meshllm("config", "show", "sed")

    assert [line.split()[0] for line in one.stdout.splitlines()] == ["setting", "top_p"]
    assert [each["name"] for each in json.loads(as_json.stdout)["settings"]] == ["seed"]
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "Unknown setting `sed`" in unknown.stderr
    assert "did you mean `seed`?" in unknown.stderr


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


def test_config_shows_a_ticket_only_by_its_name(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_JOIN", "meshllm1secret")

    for words in ((), ("--origin",), ("--json",)):
        told = meshllm("config", "show", *words).stdout
        assert ("(hidden)" in told, "meshllm1secret" in told) == (True, False)
    assert "meshllm1secret" in meshllm("config", "show", "join").stdout
