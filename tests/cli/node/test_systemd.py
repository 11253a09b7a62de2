import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshllm.cli.app import command_tree
from meshllm.cli.node.systemd import SHELL, command, unit
from meshllm.config import load
from meshllm.errors import NotAuthorised, OutOfMemory, UserError
from tests.cli.conftest import Invoke


@pytest.fixture(autouse=True)
def shell(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that moves no folder."""
    for name in SHELL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


def test_a_unit_starts_the_command(meshllm: Invoke) -> None:
    text = unit(["/opt/bin/meshllm", "node", "--name", "two words"])

    assert '\nExecStart=/opt/bin/meshllm node --name "two words"\n' in text
    assert "\nWantedBy=default.target\n" in text


def test_the_journal_gets_the_log_without_tickets() -> None:
    assert "\nStandardOutput=null\nStandardError=journal\n" in unit(["x"])


def test_systemd_specifiers_are_escaped() -> None:
    assert '\nExecStart=x 50%% $$HOME "a\\"b" ""\n' in unit(["x", "50%", "$HOME", 'a"b', ""])


def test_a_line_break_stays_within_its_word() -> None:
    text = unit(["x", "a\nExecStart=/bin/evil", "b\r"])

    assert '\nExecStart=x "a\\nExecStart=/bin/evil" "b\\r"\n' in text


def test_the_command_contains_settings_a_service_would_not_find(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".config" / "meshllm").mkdir(parents=True)
    (home / ".config" / "meshllm" / "config.toml").write_text('name = "attic"\n')
    (home / "meshllm.toml").write_text("context = 512\n")
    monkeypatch.setenv("MESHLLM_THREADS", "2")
    monkeypatch.setattr(sys, "argv", ["/opt/bin/meshllm"])
    config = load({"join": "meshllm1secret", "discovery": False, "state": "here"})

    words = command(config, ("name", "context", "threads", "join", "discovery", "state", "model"))

    assert words == [
        "/opt/bin/meshllm", "node", "--context", "512", "--threads", "2", "--no-discovery",
        "--state", str(home / "here"),
    ]  # fmt: skip


def test_what_no_flag_says_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/meshllm"])
    given = {"exact": False, "discovery": True, "auto": True, "require_key": False}

    words = command(load({**given}), given)

    assert words == [
        "/usr/bin/env", "MESHLLM_EXACT=false", "MESHLLM_DISCOVERY=true",
        "MESHLLM_REQUIRE_KEY=false", "/opt/bin/meshllm", "node", "--auto",
    ]  # fmt: skip
    known = command_tree().commands["node"].params
    assert "--auto" in {option for each in known for option in each.opts}


def test_a_service_finds_the_folders_of_the_shell(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/meshllm"])
    monkeypatch.setenv("XDG_STATE_HOME", "/mnt/state")
    monkeypatch.setenv("HF_HOME", "hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    assert command(load({}), ()) == [
        "/usr/bin/env", "XDG_STATE_HOME=/mnt/state", f"HF_HOME={home / 'hub'}", "HF_HUB_OFFLINE=1",
        "/opt/bin/meshllm", "node",
    ]  # fmt: skip


def test_what_may_pass_is_tried_again_ever_later() -> None:
    (line,) = re.findall("^RestartPreventExitStatus=(.*)$", unit(["x"]), re.MULTILINE)

    final = {str(each.exit_code) for each in (UserError, NotAuthorised)}
    assert set(line.split()) == {*final, "130"}
    assert str(OutOfMemory.exit_code) not in line.split()
    assert "\nRestartSec=5\n" in unit(["x"])
    assert "\nRestartSteps=6\nRestartMaxDelaySec=5min\n" in unit(["x"])


def test_the_folder_of_a_model_is_made_absolute(home: Path) -> None:
    (home / "mine").mkdir()

    assert command(load({"model": "mine"}), ("model",))[-1] == str(home / "mine")
    assert command(load({"model": "Qwen/Qwen3"}), ("model",))[-1] == "Qwen/Qwen3"
    assert command(load({"draft": "mine"}), ("draft",))[-1] == str(home / "mine")
    several = command(load({"model": "./mine, builtin,~/mine"}), ("model",))[-1]
    assert several == f"{home / 'mine'},builtin,{home / 'mine'}"


def test_a_module_is_started_by_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/meshllm/__main__.py"])

    assert command(load({}), ()) == [sys.executable, "-m", "meshllm", "node"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "meshllm.service"
    path.write_text(unit([sys.executable, "-m", "meshllm", "node"]))

    told = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "meshllm.service" not in told.stderr
