import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.shared.client import client_ticket
from meshllm.cli.shared.options import help_of
from meshllm.config import (
    PROJECT_KEYS,
    Config,
    Scalar,
    Settings,
    change,
    current,
    files,
    keys,
    load,
    parse,
    state_path,
)
from meshllm.config_file import drop, put, write
from meshllm.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder; the user's own file is in `user/meshllm/config.toml`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "user" / "meshllm").mkdir(parents=True)
    return tmp_path


def _load(
    folder: Path,
    *,
    user: str = "",
    project: str = "",
    environ: dict[str, str] | None = None,
    **flags: Scalar,
) -> Config:
    (folder / "user" / "meshllm" / "config.toml").write_text(user)
    (folder / "meshllm.toml").write_text(project)
    return load(flags, environ=environ or {}, folder=folder)


def test_nothing_set_gives_the_defaults(folder: Path) -> None:
    config = load({"nodes": None}, environ={"PATH": "/bin"}, folder=folder)

    assert config.settings == Settings()
    assert set(config.origins.values()) == {"default"}
    assert config.origins.keys() == keys().keys()


def test_a_later_origin_wins(folder: Path) -> None:
    user, project, environ = "top_k = 2", "top_k = 3", {"MESHLLM_TOP_K": "4"}

    configs = [
        _load(folder, user=user),
        _load(folder, user=user, project=project),
        _load(folder, user=user, project=project, environ=environ),
        _load(folder, user=user, project=project, environ=environ, top_k=5),
    ]

    assert [(each.settings.sampling.top_k, each.origins["top_k"]) for each in configs] == [
        (2, str(folder / "user" / "meshllm" / "config.toml")),
        (3, str(folder / "meshllm.toml")),
        (4, "MESHLLM_TOP_K"),
        (5, "--top-k"),
    ]


def test_origins_mix_setting_by_setting(folder: Path) -> None:
    config = _load(
        folder,
        user='model = "a/b"\nhistory = false',
        project="top_k = 40\ntemperature = 1",
        environ={"MESHLLM_TOP_P": "0.5", "MESHLLM_DEBUG": "yes"},
        max_tokens=7,
    )

    settings = config.settings
    assert (settings.model, settings.history, settings.debug) == ("a/b", False, True)
    assert (settings.max_tokens, settings.sampling.top_k) == (7, 40)
    assert (settings.sampling.top_p, settings.sampling.temperature) == (0.5, 1.0)
    assert type(settings.sampling.temperature) is float
    assert config.origins["max_tokens"] == "--max-tokens"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("node = 3", "Unknown setting `node`", "did you mean `nodes`?"),
        ("xyzzy = 3", "Unknown setting `xyzzy`", "`man meshllm` lists them"),
        ('nodes = "3"', "`nodes` is '3', not a whole number", None),
        ("nodes = true", "`nodes` is True, not a whole number", None),
        ("nodes = 1.5", "`nodes` is 1.5, not a whole number", None),
        ("nodes = 0", "`nodes` is 0, not between 1 and 1024", None),
        ("max_tokens = 0", "`max_tokens` is 0, not between 1 and 10000000", None),
        ("frequency_penalty = 3", "`frequency_penalty` is 3.0, not between -2 and 2", None),
        ("top_p = nan", "`top_p` is nan, not between 0 and 1", None),
        ('ends = "last"', "Invalid value 'last' for `ends`", "one of `entry`, `client`"),
        ("history = 1", "`history` is 1, not true or false", None),
        ("[model]\nname = 1", "`model` is {'name': 1}, not text", None),
        ("nodes = ", "Cannot read", "repair it with `meshllm config edit`"),
        ("nodes = " + "9" * 5000, "Cannot read", "repair it with `meshllm config edit`"),
        ("nodes = " + "[" * 5000, "Cannot read", "repair it with `meshllm config edit`"),
        ("seed = 0x" + "f" * 4000, "`seed` is a number of thousands of digits, not between", None),
        (
            "ends = 0x" + "f" * 4000,
            "Invalid value a number of thousands of digits",
            "one of `entry`, `client`",
        ),
        ("model = [0x" + "f" * 4000 + "]", "`model` is a number of thousands of digits", None),
        ('state = ""', "`state` is empty", "name one, or leave it out"),
        ('model = "a\\u0000b"', "`model` has a NUL character", "remove it"),
        ('memory = "8G"', "Invalid memory size `8G` for `memory`", "write it as `8GiB`"),
        ('prefix_cache = "0%"', "Invalid memory share `0%` for `prefix_cache`", "write `50%`"),
        ('keep = "10"', "Invalid duration `10` for `keep`", "write it as `90s`"),
        ('layers = "3"', "Invalid layer span `3` for `layers`", "write it as `0:14`"),
        ('serve = "8080"', "Invalid address `8080` for `serve`", "write it as `HOST:PORT`"),
    ],
)
def test_an_invalid_file_is_reported(
    folder: Path, text: str, message: str, hint: str | None
) -> None:
    with pytest.raises(UserError) as caught:
        _load(folder, user=text)

    assert message in str(caught.value)
    assert str(folder / "user" / "meshllm" / "config.toml") in str(caught.value)
    assert (caught.value.hint or "").startswith(hint or "")


def test_texts_with_a_form_are_accepted(folder: Path) -> None:
    lines = 'memory = "50%"', 'prefix_cache = "0"', 'keep = "1h"', 'serve = "[::1]:0"'

    settings = _load(folder, user="\n".join(lines)).settings

    assert (settings.memory, settings.prefix_cache, settings.keep) == ("50%", "0", "1h")


def test_the_folder_of_the_state_may_be_in_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    assert state_path(Settings(state="~/mesh")) == Path("/home/me/mesh")
    assert state_path(Settings(state="./~x")) == Path.cwd() / "~x"
    with pytest.raises(UserError, match="`~no-such-user` is not known"):
        state_path(Settings(state="~no-such-user/mesh"))


def test_a_home_that_is_not_a_folder_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)  # common in batch jobs

    assert load({}).settings == Settings()


def test_a_file_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    path = files(folder)[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\ufeffmax_tokens = 7\n", encoding="utf-8")

    assert load({}, environ={}, folder=folder).settings.max_tokens == 7


def test_a_binary_file_is_reported(folder: Path) -> None:
    (folder / "meshllm.toml").write_bytes(b"model = '\xff'")

    with pytest.raises(UserError, match=r"Cannot read `.*meshllm\.toml`") as caught:
        load({}, environ={}, folder=folder)

    assert caught.value.hint == "repair it with `meshllm config edit --project`"


def test_a_pipe_in_place_of_a_file_is_reported(folder: Path) -> None:
    os.mkfifo(folder / "meshllm.toml")

    with pytest.raises(UserError, match="not a regular file"):
        load({}, environ={}, folder=folder)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("MESHLLM_NODE", "3", "Unknown setting `node`"),
        ("MESHLLM_NODES", "three", "`nodes` is 'three', not a whole number"),
        ("MESHLLM_SEED", "-1", "`seed` is -1, not between 0"),
        ("MESHLLM_HISTORY", "perhaps", "`history` is 'perhaps', not true or false"),
        ("MESHLLM_TEMPERATURE", "inf", "`temperature` is inf, not between"),
    ],
)
def test_an_invalid_variable_is_reported(
    folder: Path, variable: str, text: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load({}, environ={variable: text}, folder=folder)

    assert message in str(caught.value)
    assert f"({variable})" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("ON", True), ("no", False), ("0", False)]
)
def test_a_boolean_variable_is_read_in_words(text: str, value: bool) -> None:
    assert parse("history", text, "here") is value


def test_a_project_file_sets_sampling_and_limits_only(folder: Path) -> None:
    refused = keys().keys() - PROJECT_KEYS

    assert {"join", "state", "relay", "listen", "model", "draft", "device", "system"} <= refused
    for name in refused:
        with pytest.raises(UserError, match=f"`{name}` cannot be set by a project file") as caught:
            _load(folder, project=f'{name} = "x"')
        assert f"`MESHLLM_{name.upper()}`" in (caught.value.hint or "")


def test_an_unknown_key_of_a_project_file_is_reported(folder: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown setting `tempreature` \(.*meshllm\.toml\)"):
        _load(folder, project="tempreature = 1")


def test_only_the_working_directory_has_a_project_file(folder: Path) -> None:
    (folder / "meshllm.toml").write_text("top_k = 9")
    inside = folder / "inside"
    inside.mkdir()

    assert load({}, environ={}, folder=inside).settings.sampling.top_k == 0
    assert files(inside)[-1] == inside / "meshllm.toml"


def test_every_setting_has_a_help_text_and_can_be_read_and_changed() -> None:
    for name, key in keys().items():
        assert current(Settings(), name) == key.default
        assert 10 < len(help_of(key)) <= 60, name
        assert change(Settings(), {name: key.default}) == Settings()


def test_a_change_leaves_the_rest_alone() -> None:
    settings = replace(Settings(), model="a/b")

    changed = change(settings, {"top_k": 3, "nodes": 2})

    assert (changed.model, changed.nodes, changed.sampling.top_k) == ("a/b", 2, 3)
    assert settings.sampling.top_k == 0


def test_one_setting_is_repaired_beside_others_that_are_invalid(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('memory = "8G"\nkeep = "10"\nxyzzy = 1')

    assert put(path, "memory", "8GiB") == "8GiB"
    drop(path, "keep")
    with pytest.raises(UserError, match="Unknown setting `xyzzy`"):
        write(path, path.read_text())
    drop(path, "xyzzy")

    write(path, path.read_text())
    assert path.read_text() == 'memory = "8GiB"\n'


def test_empty_values_mean_none(folder: Path) -> None:
    settings = load({}, environ={"MESHLLM_SERVE": "", "MESHLLM_JOIN": ""}, folder=folder).settings

    assert not settings.serve
    assert client_ticket(settings) is None
