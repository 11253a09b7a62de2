"""The unix socket of a node: private, and of one node only."""

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshllm.errors import UserError

SOCKET = "door.sock"
"""Name of the socket in the state folder."""
PATH_BYTES = 100  # sun_path has 104 bytes on macOS, 108 on Linux, with the zero at the end

_ANSWERED = {0, errno.EAGAIN}  # EAGAIN: so many wait already that the queue is full


def is_answered(path: Path) -> bool:
    """Tell whether somebody who lets us in listens there."""
    return len(os.fsencode(path)) <= PATH_BYTES and _knock(path) in _ANSWERED


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Bind a socket that only its owner can reach; remove it at the end.

    Raises:
        UserError: a node is already running there, or the place is too long or not private.
    """
    if (length := len(os.fsencode(path))) > PATH_BYTES:
        raise UserError(
            f"`{path}` has {length} bytes, and the name of a socket at most {PATH_BYTES}",
            hint="choose a shorter folder with `--state`",
        )
    _make_private(path.parent)
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX) as bound:
        _bind(bound, path)
        try:
            yield bound
        finally:
            path.unlink(missing_ok=True)


def _bind(bound: socket.socket, path: Path) -> None:
    try:
        # Linux gives the file the mode of its socket, so it is never open to others, not for a
        # moment; elsewhere the folder keeps them out.
        if sys.platform == "linux":
            os.fchmod(bound.fileno(), 0o600)
        bound.bind(os.fsencode(path))
        path.chmod(0o600)
    except OSError as error:
        raise UserError(f"`{path}` is no place for a socket: {error.strerror}") from None


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise UserError(f"`{folder}` is no folder: {error.strerror}") from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        mode = stat.filemode(found.st_mode)
        raise UserError(f"Others can enter `{folder}` ({mode})", hint=f"`chmod 700 {folder}`")


def _remove_stale(path: Path) -> None:
    """Remove the socket of a node that was killed; nothing else."""
    found = _knock(path)
    if found == errno.ECONNREFUSED and stat.S_ISSOCK(path.lstat().st_mode):
        path.unlink(missing_ok=True)
    elif found in _ANSWERED:
        raise UserError(
            f"A node is already running: it answers at `{path}`",
            hint="stop it, or choose another folder with `--state`",
        )


def _knock(path: Path) -> int:
    """Connect without waiting, and return the error number."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fsencode(path))
