import json
import signal
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshllm.config import keys, load
from meshllm.config_file import put
from tests.cli.conftest import Invoke


@pytest.fixture
def user(home: Path) -> Path:
    """The settings of the user, which do not exist yet."""
    return home / "config" / "meshllm" / "config.toml"


def test_a_setting_is_written_and_removed(meshllm: Invoke, user: Path) -> None:
    assert meshllm("config", "set", "top-p", "0.9").exit_code == 0
    told = meshllm("config", "set", "model", "org/model")

    assert told.stderr.strip() == f"model = org/model in {user}"
    assert tomllib.loads(user.read_text()) == {"top_p": 0.9, "model": "org/model"}
    assert load({}).settings.sampling.top_p == 0.9

    assert meshllm("config", "unset", "top_p").exit_code == 0
    assert tomllib.loads(user.read_text()) == {"model": "org/model"}


def test_a_new_file_is_private_and_an_old_one_keeps_its_mode(meshllm: Invoke, user: Path) -> None:
    meshllm("config", "set", "seed", "1")
    assert user.stat().st_mode & 0o777 == 0o600
    user.chmod(0o644)

    meshllm("config", "set", "seed", "2")

    assert user.stat().st_mode & 0o777 == 0o644
    assert list(user.parent.iterdir()) == [user]


def test_a_file_that_cannot_be_written_need_not_be(
    meshllm: Invoke, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "file"))

    result = meshllm("config", "set", "members", "3")

    assert result.exit_code == 2
    assert "config.toml` cannot be written: Not a directory\n" in result.stderr
    hint = "check the path; flags and variables such as `MESHLLM_MODEL` need no file"
    assert result.stderr.endswith(f"\nhint: {hint}\n")


def test_a_link_to_the_file_stays_a_link(meshllm: Invoke, user: Path, home: Path) -> None:
    user.parent.mkdir(parents=True)
    user.symlink_to(home / "dotfiles.toml")

    meshllm("config", "set", "seed", "1")

    assert user.is_symlink()
    assert (home / "dotfiles.toml").read_text() == "seed = 1\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("set", "temprature", "1"), "did you mean `temperature`?"),
        (("set", "temperature", "hot"), "`temperature` is 'hot', not a number"),
        (("set", "top_p", "2"), "not between 0 and 1"),
        (("set", "model", "x", "--project"), "cannot be set by a project file"),
        (("unset", "seed"), "does not set `seed`"),
        (("unset", "modle"), "did you mean `model`?"),
    ],
)
def test_what_is_not_valid_changes_nothing(
    meshllm: Invoke, user: Path, words: tuple[str, ...], error: str
) -> None:
    meshllm("config", "set", "model", "mine")

    result = meshllm("config", *words)

    assert (result.exit_code, error in result.stderr) == (2, True), result.stderr
    assert user.read_text() == 'model = "mine"\n'


def test_a_project_has_its_own_file(meshllm: Invoke, home: Path) -> None:
    meshllm("config", "set", "--project", "max_tokens", "64")

    assert (home / "meshllm.toml").read_text() == "max_tokens = 64\n"
    assert meshllm("config", "path", "--project").stdout.strip() == str(home / "meshllm.toml")


def test_a_setting_that_has_no_effect_is_pointed_out(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_SEED", "7")

    assert "`MESHLLM_SEED` sets it, too" in meshllm("config", "set", "seed", "1").stderr


def test_a_damaged_file_is_named_and_kept(meshllm: Invoke, user: Path) -> None:
    user.parent.mkdir(parents=True)
    user.write_text("seed = ")

    result = meshllm("config", "set", "seed", "1")

    assert (result.exit_code, str(user) in result.stderr) == (2, True)
    assert user.read_text() == "seed = "


def test_a_new_file_is_edited_from_a_list_of_all_settings(
    meshllm: Invoke, user: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("EDITOR", _editor(home, "sed -i 's/^# seed = .*/seed = 7/'"))

    assert meshllm("config", "edit").exit_code == 0

    lines = user.read_text().splitlines()
    assert load({}).settings.sampling.seed == 7
    named = {line.removeprefix("# ").partition(" = ")[0] for line in lines}
    assert set(keys()) <= named
    commented = "\n".join(line.removeprefix("# ") for line in lines if " = " in line)
    assert set(tomllib.loads(commented)) == set(keys())


def test_an_edit_that_is_not_valid_can_be_repeated(
    meshllm: Invoke, user: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    user.parent.mkdir(parents=True)
    user.write_text("# mine\nseed = 1\n")
    monkeypatch.setenv("EDITOR", _editor(home, "sed -i -e 's/seed = 1/sead = 98/'"))

    refused = meshllm("config", "edit", stdin="n\n")
    assert (refused.exit_code, "did you mean `seed`?" in refused.stderr) == (2, True)
    assert user.read_text() == "# mine\nseed = 1\n"

    monkeypatch.setenv("EDITOR", _editor(home, "sed -i -e s/sead/seed/ -e 's/seed = 1/sead = 98/'"))
    assert meshllm("config", "edit", stdin="y\n").exit_code == 0
    assert user.read_text() == "# mine\nseed = 98\n"


def test_a_file_that_changes_during_an_edit_is_not_replaced(
    meshllm: Invoke, user: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    user.parent.mkdir(parents=True)
    user.write_text("seed = 1\n")
    monkeypatch.setenv("EDITOR", _editor(home, f"echo 'seed = 2' > {user}; echo 'top_k = 9' >"))

    result = meshllm("config", "edit")

    kept = user.with_name("config.toml.edited")
    assert (result.exit_code, f"the edited text is in `{kept}`" in result.stderr) == (2, True)
    assert (user.read_text(), kept.read_text()) == ("seed = 2\n", "top_k = 9\n")


def test_settings_that_are_set_at_the_same_time_are_all_kept(meshllm: Invoke, user: Path) -> None:
    meshllm("config", "set", "seed", "1")
    names = {"top_k": 5, "max_tokens": 9, "nodes": 2, "temperature": 0.5}
    with ThreadPoolExecutor() as threads:
        for name, value in names.items():
            threads.submit(put, user, name, str(value))

    assert tomllib.loads(user.read_text()) == {"seed": 1, **names}


def test_a_setting_is_written_beside_an_invalid_one(meshllm: Invoke, user: Path) -> None:
    user.parent.mkdir(parents=True)
    user.write_text("foo = 1\n")

    assert meshllm("config", "set", "seed", "7").exit_code == 0


@pytest.mark.parametrize("place", [b"seed = 1 # \xe9\n", None])
def test_a_file_that_cannot_be_read_can_be_repaired(
    meshllm: Invoke, user: Path, home: Path, monkeypatch: pytest.MonkeyPatch, place: bytes | None
) -> None:
    user.parent.mkdir(parents=True)
    if place is None:
        user.mkdir()
    else:
        user.write_bytes(place)
    monkeypatch.setenv("EDITOR", _editor(home, "LC_ALL=C sed -i 's/ #.*//'"))

    result = meshllm("config", "edit")

    if place is None:
        assert (result.exit_code, "is a directory" in result.stderr) == (2, True)
    else:
        assert (result.exit_code, user.read_text()) == (0, "seed = 1\n"), result.stderr


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [("printf '\\377' >", 2, "can't decode byte 0xff"), ("rm", 0, "nothing changed")],
)
def test_an_editor_may_leave_anything(
    meshllm: Invoke,
    user: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    code: int,
    told: str,
) -> None:
    monkeypatch.setenv("EDITOR", _editor(home, command))

    result = meshllm("config", "edit", stdin="n\n")

    assert (result.exit_code, told in result.stderr, user.exists()) == (code, True, False)


def test_an_interrupt_is_left_to_the_editor(
    meshllm: Invoke, user: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupted = "trap 'echo seed = 7 > $1' INT; kill -INT $PPID $$; true"
    monkeypatch.setenv("EDITOR", _editor(home, interrupted))

    result = meshllm("config", "edit")

    assert (result.exit_code, user.read_text()) == (0, "seed = 7\n"), result.stderr
    assert signal.getsignal(signal.SIGINT) is before


def test_a_value_that_is_not_utf8_is_refused(
    meshllm: Invoke, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = meshllm("config", "set", "name", "caf\udce9")
    monkeypatch.setenv("MESHLLM_NAME", "caf\udce9")
    read = meshllm("config", "show")

    assert [given.exit_code, read.exit_code] == [2, 2]
    assert "`VALUE` is not UTF-8 at character 3" in given.stderr
    assert "`name` is not UTF-8 at character 3 (MESHLLM_NAME)" in read.stderr
    assert not user.exists()


def _editor(folder: Path, command: str) -> str:
    script = folder / "editor"
    script.write_text(f'#!/bin/sh\n{command} "$1"\n')
    script.chmod(0o755)
    return str(script)


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
