import errno
import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshllm.api.access.accounts import FILE, Accounts, tag_of
from meshllm.cli.terminal import render
from meshllm.errors import TimedOut
from tests.builders.fake_client import FakeClient
from tests.builders.status import status_of
from tests.cli.conftest import Invoke


def test_only_the_key_goes_to_stdout(meshllm: Invoke, home: Path) -> None:
    result = meshllm("key", "create", "laptop")

    with Accounts.open(home / "state" / "meshllm") as accounts:
        found = accounts.find(result.stdout.strip())
    assert found
    assert found.name == "laptop"
    assert "cannot be shown again" in result.stderr


def test_a_full_disk_is_reported(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Accounts, "create", fail)

    result = meshllm("key", "create", "laptop")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be read or changed: database or disk is full\nhint: free space" in result.stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_key_that_cannot_be_printed_is_named(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(render, "put", fail)
        result = meshllm("key", "create", "laptop", *form)

    assert result.exit_code == 1
    assert "nobody has seen this key: revoke it with `meshllm key revoke laptop`" in result.stderr
    (stored,) = json.loads(meshllm("key", "list", "--json").stdout)["keys"]
    assert stored["name"] == "laptop"


def test_limits_are_stored(meshllm: Invoke) -> None:
    words: tuple[str, ...] = (
        "--expires",
        "30d",
        "--models",
        "a,b",
        "--concurrency",
        "2",
        "--tokens-per-day",
        "9",
    )
    words = (*words, "--trust", "attic, cellar", "--deadline", "5m", "--max-reasoning", "0")
    made = json.loads(meshllm("key", "create", "ci", *words, "--json").stdout)

    (listed,) = json.loads(meshllm("key", "list", "--json").stdout)["keys"]
    assert listed["expires_s"] == made["expires_s"] == listed["created_s"] + 30 * 86400
    assert (listed["models"], listed["concurrency"], listed["tokens_per_day"]) == (["a", "b"], 2, 9)
    assert listed["trust"] == ["attic", "cellar"]
    assert (listed["deadline_s"], listed["max_reasoning"]) == (300, 0)
    assert made["key"] not in meshllm("key", "list", "--json").stdout
    head, row = meshllm("key", "list").stdout.splitlines()
    assert "attic, cellar" in row
    assert (head.split()[-4:], row.split()[-2:]) == (
        ["trusted", "deadline", "s", "reasoning"],
        ["300", "0"],
    )


def test_a_list_shows_every_key_and_no_secret(meshllm: Invoke) -> None:
    keys = [meshllm("key", "create", name).stdout.strip() for name in ("laptop", "phone")]
    meshllm("key", "revoke", "phone")

    told = meshllm("key", "list").stdout

    assert [word in told for word in ("laptop", "phone", "active", "revoked", "never")] == [
        True
    ] * 5
    assert not any(key in told for key in keys)


def test_an_empty_list_says_how_to_create_one(meshllm: Invoke) -> None:
    result = meshllm("key", "list")

    assert (result.stdout, "meshllm key create NAME" in result.stderr) == ("", True)


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 65, "../x", "é"])
def test_an_invalid_name_is_refused(meshllm: Invoke, name: str) -> None:
    result = meshllm("key", "create", "--", name)

    assert (result.exit_code, "Invalid name" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("create", "a", "--expires", "soon"), "Invalid duration `soon`"),
        (("create", "a", "--expires", "999999999d"), "Invalid duration `999999999d`"),
        (("create", "a", "--trust", ","), "`--trust` names no node"),
        (("create", "a", "--deadline", "soon"), "Invalid duration `soon`"),
        (("create", "a", "--deadline", "0s"), "Invalid duration `0s`"),
        (("create", "a", "--max-reasoning", "-1"), "Invalid value for '--max-reasoning'"),
        (("create", "a", "--models", ""), "`--models` names no model"),
        (("create", "a", "--models", "fox\x1b"), "empty or not printable"),
        (("create", "a", "--tokens-per-day", str(1 << 63)), "`tokens_per_day` of a key is"),
        (("create", "a", "--concurrency", "0"), "Invalid value for '--concurrency'"),
        (("revoke", "nobody"), "There is no key `nobody`"),
    ],
)
def test_what_cannot_be_done_is_said(meshllm: Invoke, words: tuple[str, ...], told: str) -> None:
    result = meshllm("key", *words)

    assert (result.exit_code, told in result.stderr) == (2, True)


def test_a_key_of_the_owner_says_so(meshllm: Invoke) -> None:
    made = json.loads(meshllm("key", "create", "me", "--owner", "--json").stdout)
    (listed,) = json.loads(meshllm("key", "list", "--json").stdout)["keys"]

    assert (made["owner"], listed["owner"]) == (True, True)
    assert "owner" in meshllm("key", "list").stdout.splitlines()[-1]


def test_keys_change_in_a_folder_where_no_node_can_listen(meshllm: Invoke, tmp_path: Path) -> None:
    state = "--state", str(tmp_path / ("x" * 100))

    made = meshllm("key", "create", "phone", "--models", "m", *state)
    revoked = meshllm("key", "revoke", "phone", *state)

    assert (made.exit_code, revoked.exit_code) == (0, 0), revoked.stderr
    assert "is revoked here" in revoked.stderr


def test_a_key_of_elsewhere_is_revoked_from_stdin(meshllm: Invoke, home: Path) -> None:
    result = meshllm("key", "revoke", "-", stdin="sk-of-elsewhere\n")

    with Accounts.open(home / "state" / "meshllm") as accounts:
        assert accounts.is_revoked("sk-of-elsewhere")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "the key is revoked here; other nodes are notified when the node runs\n"


def test_a_date_that_no_calendar_has_is_listed(meshllm: Invoke, home: Path) -> None:
    meshllm("key", "create", "old", "--expires", "1d")
    with closing(sqlite3.connect(home / "state" / "meshllm" / FILE)) as database:
        database.execute("UPDATE keys SET expires_s = ?", (1 << 53,))  # an earlier version did
        database.commit()

    result = meshllm("key", "list")

    assert (result.exit_code, "9999-12-31" in result.stdout) == (0, True), result.stderr


def test_a_key_in_any_bytes_is_revoked_from_stdin(meshllm: Invoke, home: Path) -> None:
    result = meshllm("key", "revoke", "-", stdin=b"sk-\xe9\xff\n")

    with Accounts.open(home / "state" / "meshllm") as accounts:
        assert accounts.is_revoked("sk-\xe9\xff")
    assert result.exit_code == 0


@pytest.mark.parametrize(
    "text", ["sk-of-the-team  # laptop\n", "# of the office\r\n\r\nsk-of-the-team\r\n"]
)
def test_a_line_of_a_key_file_is_revoked_without_its_comment(
    meshllm: Invoke, home: Path, text: str
) -> None:
    result = meshllm("key", "revoke", "-", stdin=text)

    with Accounts.open(home / "state" / "meshllm") as accounts:
        assert (result.exit_code, accounts.is_revoked("sk-of-the-team")) == (0, True)


def test_several_keys_are_not_revoked_at_once(meshllm: Invoke, home: Path) -> None:
    result = meshllm("key", "revoke", "-", stdin="sk-one\nsk-two\n")

    with Accounts.open(home / "state" / "meshllm") as accounts:
        assert (result.exit_code, accounts.revoked()) == (2, [])
    assert "stdin has 2 keys" in result.stderr


def test_stdin_of_nohup_has_no_key(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.open(os.devnull, os.O_WRONLY)) as stdin:  # noqa: PTH123  # for writing only
        monkeypatch.setattr("meshllm.cli.commands.key.sys", SimpleNamespace(stdin=stdin))
        result = meshllm("key", "revoke", "-")

    assert result.exit_code == 2
    assert "stdin has no key" in result.stderr


@pytest.mark.parametrize("text", ["", "\n", "# none\n", "x" * 257])
def test_stdin_must_have_a_key(meshllm: Invoke, text: str) -> None:
    result = meshllm("key", "revoke", "-", stdin=text)

    assert (result.exit_code, "no key of 1 to 256 characters" in result.stderr) == (2, True)


def test_a_running_node_tells_the_mesh(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(monkeypatch)
    monkeypatch.setattr("meshllm.cli.commands.key.NodeClient", client)
    monkeypatch.setattr("meshllm.cli.commands.key._is_running", lambda _: True)
    key = meshllm("key", "create", "laptop").stdout.strip()

    result = meshllm("key", "revoke", "laptop")

    assert client.posted == [(tag_of(key),)]
    assert result.stderr == "`laptop` is revoked at all API servers of the mesh\n"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_model_that_is_not_served_is_noted(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    client = FakeClient(monkeypatch)
    status = status_of(2)
    assert status.model
    client.statuses = [replace(status, models=(replace(status.model, name="a", aliases=("b",)),))]
    monkeypatch.setattr("meshllm.cli.commands.key.NodeClient", client)
    monkeypatch.setattr("meshllm.cli.commands.key._is_running", lambda _: True)

    typo = meshllm("key", "create", "one", "--models", "a,b,c,d", *form)
    known = meshllm("key", "create", "two", "--models", "a,b", *form)

    assert (typo.exit_code, known.exit_code) == (0, 0)
    assert typo.stdout.count("sk-meshllm-") == 1
    assert typo.stderr.endswith("note: the mesh does not serve `c`, `d` now\n")
    assert "note" not in known.stderr


def test_a_node_that_does_not_answer_fails_no_key(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient(monkeypatch)
    client.statuses = [TimedOut("the node does not answer")]
    monkeypatch.setattr("meshllm.cli.commands.key.NodeClient", client)
    monkeypatch.setattr("meshllm.cli.commands.key._is_running", lambda _: True)

    made = meshllm("key", "create", "one", "--models", "a")

    assert (made.exit_code, made.stdout.count("sk-meshllm-")) == (0, 1)
