"""The unix socket of a node: accessible to its owner only, used by one node at a time."""

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshllm.errors import UserError
from meshllm.local_files import reason_of

SOCKET = "api.sock"
"""Name of the socket in the state folder."""
PATH_BYTES = 100  # sun_path has 104 bytes on macOS, 108 on Linux, with the terminating zero

_CHOOSE = "choose a folder that only you can write to: `--state FOLDER`"
_ANSWERED = {0, errno.EAGAIN}  # EAGAIN: the queue of the listening socket is full


def is_answered(path: Path) -> bool:
    """Return whether a process listens there and accepts connections from this user."""
    return len(os.fsencode(path)) <= PATH_BYTES and _probe(path) in _ANSWERED


def check_usable(path: Path) -> None:
    """Raise `UserError` if no node answers there, and none of this user can listen there.

    The folder may be missing.
    """
    _check_length(path)
    if why := _find_obstacle(path):
        raise UserError(
            f"State folder `{path.parent}` cannot be used: {why}",
            hint=_CHOOSE,
        )


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Bind a socket that only its owner can connect to; remove it at the end.

    Raises:
        UserError: a node is already running there, or the path is too long or not private.
    """
    _check_length(path)
    _make_private(path.parent)
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX) as bound:
        _bind(bound, path)
        try:
            yield bound
        finally:
            path.unlink(missing_ok=True)


def _find_obstacle(path: Path) -> str:
    """Return why no node of this user can use the folder of a socket; empty if one can.

    Empty too if a node answers there, which may be one of another user: root may ask each.
    """
    if (found := _probe(path)) in _ANSWERED:
        return ""
    if found not in {errno.ENOENT, errno.ECONNREFUSED}:
        return reason_of(OSError(found, os.strerror(found)))
    try:
        is_own = path.parent.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return ""
    return "" if is_own else "it belongs to another user"


def _check_length(path: Path) -> None:
    if (length := len(os.fsencode(path))) > PATH_BYTES:
        raise UserError(
            f"Socket path `{path}` is too long: {length} bytes, at most {PATH_BYTES}",
            hint="choose a shorter folder with `--state`",
        )


def _bind(bound: socket.socket, path: Path) -> None:
    try:
        # Linux creates the file with the mode of the socket, so it is private from the start;
        # elsewhere the mode of the folder protects it.
        if sys.platform == "linux":
            os.fchmod(bound.fileno(), 0o600)
        bound.bind(os.fsencode(path))
        path.chmod(0o600)
    except OSError as error:
        text = f"Cannot create the socket `{path}`: {error.strerror}"
        raise UserError(text, hint="choose another folder with `--state`") from None


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        text = f"Cannot use the folder `{folder}`: {error.strerror}"
        raise UserError(text, hint="choose another folder with `--state`") from None
    if found.st_uid != os.geteuid():
        text = f"Folder `{folder}` belongs to another user"
        raise UserError(text, hint=_CHOOSE)
    if found.st_mode & 0o077:
        mode = stat.filemode(found.st_mode)
        message = f"Folder `{folder}` is accessible to other users ({mode})"
        raise UserError(message, hint=f"`chmod 700 {folder}`")


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a killed node, and nothing else."""
    found = _probe(path)
    if found == errno.ECONNREFUSED and stat.S_ISSOCK(path.lstat().st_mode):
        path.unlink(missing_ok=True)
    elif found in _ANSWERED:
        raise UserError(
            f"A node is already running and listens on `{path}`",
            hint="stop it, or choose another folder with `--state`",
        )


def _probe(path: Path) -> int:
    """Connect without blocking; return the error number."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fsencode(path))
