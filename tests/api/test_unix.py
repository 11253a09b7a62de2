import os
import socket
import stat
from pathlib import Path

import pytest

from meshllm.api.unix import is_answered, listening
from meshllm.errors import UserError

pytestmark = pytest.mark.socket


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "api.sock"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_reach_it(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with listening(path):
            modes = _mode(path), _mode(path.parent)
    finally:
        os.umask(before)

    assert modes == (0o600, 0o700)


def test_the_socket_is_removed_afterwards(path: Path) -> None:
    with listening(path) as bound:
        bound.listen()
        was_answered = is_answered(path)

    assert was_answered
    assert not path.exists()
    assert not is_answered(path)


def test_a_second_node_is_refused(path: Path) -> None:
    with listening(path) as bound:
        bound.listen()

        with pytest.raises(UserError, match="A node is already running"), listening(path):
            pass

        assert is_answered(path)


def test_a_second_node_is_refused_while_the_first_is_busy(path: Path) -> None:
    with listening(path) as bound, socket.socket(socket.AF_UNIX) as waiting:
        bound.listen(0)
        waiting.connect(str(path))

        with pytest.raises(UserError, match="A node is already running"), listening(path):
            pass


def test_the_socket_of_a_killed_node_is_replaced(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))

    with listening(path) as bound:
        bound.listen()

        assert is_answered(path)


def test_a_file_is_not_replaced(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")

    with pytest.raises(UserError, match="Cannot create the socket"), listening(path):
        pass

    assert path.read_text() == "mine"


def test_a_too_long_path_is_reported(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100)

    with pytest.raises(UserError, match="at most 100") as wrong, listening(path):
        pass

    assert wrong.value.hint == "choose a shorter folder with `--state`"
    assert not is_answered(path)


def test_a_folder_accessible_to_others_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o750)

    with (
        pytest.raises(UserError, match=r"accessible to other users \(drwxr-x---\)"),
        listening(path),
    ):
        pass


def test_a_folder_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: path.parent.stat().st_uid + 1)

    with pytest.raises(UserError, match="belongs to another user") as wrong, listening(path):
        pass

    assert wrong.value.hint == "choose a folder that only you can write to: `--state FOLDER`"


def test_a_file_instead_of_the_folder_is_reported(path: Path) -> None:
    path.parent.write_text("")

    with pytest.raises(UserError, match=r"Cannot use the folder .*: File exists"), listening(path):
        pass
