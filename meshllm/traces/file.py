"""The file of a trace: private, append-only, and less important than the requests themselves."""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from meshllm.errors import UserError
from meshllm.local_files import open_own

logger = logging.getLogger(__name__)


class TraceFile:
    """Appends lines to a file; each is written whole, or not at all."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._writing = Lock()
        self._has_failed = False

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["TraceFile"]:
        """Open a file for one process, and make it private; create it if it is missing.

        Raises:
            UserError: it is a link or not a regular file, belongs to another user, or another
                process writes it.
        """
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for its reader.
            descriptor = open_own(path, os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            _claim(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _unusable(path, error) from None
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def write(self, lines: bytes) -> None:
        """Append lines; if that fails, as on a full disk, warn once and drop them."""
        with self._writing:
            try:
                _append(self._descriptor, lines)
            except OSError as error:
                if not self._has_failed:
                    logger.warning(
                        "requests are missing from the trace `%s`: %s", self._path, error.strerror
                    )
                self._has_failed = True


def _append(descriptor: int, lines: bytes) -> None:
    end = os.fstat(descriptor).st_size
    if os.write(descriptor, lines) < len(lines):
        os.ftruncate(descriptor, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _claim(descriptor: int) -> None:
    """Check that a file is regular, make it private, and lock it."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.fchmod(descriptor, 0o600)


def _unusable(path: Path, error: OSError) -> UserError:
    reasons = {
        errno.ELOOP: "it is a link",
        errno.EWOULDBLOCK: "another process writes it",
        errno.ENXIO: "not a regular file",
    }
    reason = reasons.get(error.errno or 0, str(error.strerror))
    return UserError(f"Cannot write the trace `{path}`: {reason}")
