import errno
import os
import stat
from pathlib import Path

import pytest

from meshllm.errors import UserError
from meshllm.traces.file import TraceFile


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_lines_are_appended_to_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"old\n")
    path.chmod(0o644)

    with TraceFile.open(path) as file:
        file.write(b"new\n")

    assert path.read_bytes() == b"old\nnew\n"
    assert mode(path) == 0o600


def test_a_new_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with TraceFile.open(tmp_path / "trace"):
            pass
    finally:
        os.umask(before)

    assert mode(tmp_path / "trace") == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")

    with (
        pytest.raises(UserError, match=r"Cannot write the trace .*: it is a link"),
        TraceFile.open(tmp_path / "link"),
    ):
        pass

    assert not (tmp_path / "target").exists()


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UserError, match="not a regular file"), TraceFile.open(path):
        pass

    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(UserError, match="not a regular file"), TraceFile.open(path):
            pass
    finally:
        os.close(reader)


def test_two_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with (
        TraceFile.open(path),
        pytest.raises(UserError, match="another process writes it"),
        TraceFile.open(path),
    ):
        pass


def test_a_full_disk_is_warned_of_once_and_no_line_is_written_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write = tmp_path / "trace", os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with TraceFile.open(path) as file:
        file.write(b"first\n")
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        file.write(b"second\n")
        monkeypatch.setattr(os, "write", full)
        file.write(b"third\n")
        monkeypatch.setattr(os, "write", write)
        file.write(b"fourth\n")

    assert path.read_bytes() == b"first\nfourth\n"
    warned = [f"requests are missing from the trace `{path}`: No space left on device"]
    assert caplog.messages == warned
