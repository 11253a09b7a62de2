import json
import sqlite3
from pathlib import Path

import pytest

from meshllm.api.access.accounts import Accounts, KeyUsage
from tests.cli.conftest import Invoke


@pytest.fixture
def used(home: Path) -> None:
    with Accounts.open(home / "state" / "meshllm") as accounts:
        accounts.record("2026-11-24", "laptop", "builtin", KeyUsage(2, 1, 30, 10, 5))
        accounts.record("2026-11-25", "", "builtin", KeyUsage(1, 0, 3, 0, 4))


@pytest.mark.parametrize(
    ("by", "names"),
    [("day", ["2026-11-24", "2026-11-25"]), ("key", ["", "laptop"]), ("model", ["builtin"])],
)
def test_usage_is_grouped(meshllm: Invoke, used: None, by: str, names: list[str]) -> None:
    told = json.loads(meshllm("usage", "--by", by, "--json").stdout)

    assert (told["schema"], told["by"]) == (1, by)
    assert [each[by] for each in told["usage"]] == names
    assert sum(each["written"] for each in told["usage"]) == 9


def test_a_table_names_requests_without_a_key(meshllm: Invoke, used: None) -> None:
    lines = meshllm("usage", "--by", "key").stdout.splitlines()

    assert lines[0].split() == ["key", "requests", "errors", "read", "cached", "written"]
    assert [line.split() for line in lines[1:]] == [
        ["(no", "key)", "1", "0", "3", "0", "4"],
        ["laptop", "2", "1", "30", "10", "5"],
    ]


def test_nothing_used_is_said(meshllm: Invoke) -> None:
    result = meshllm("usage")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no requests yet\n")


def test_a_damaged_file_is_reported(
    meshllm: Invoke, used: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(Accounts, "usage", fail)

    result = meshllm("usage")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be read or changed: database disk image is malformed\n" in result.stderr
    assert "bug" not in result.stderr
