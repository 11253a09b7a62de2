"""Files and folders that other users of the machine, or the author of a model, may have prepared.

Reading never waits for a pipe, never reads a device, and is bounded. What only this user may write,
such as keys and cached results, is neither read nor written through links that others planted.
"""

import errno
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_HINTS = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file, not a folder",
    errno.EACCES: "check who may use it with `ls -ld`, or choose another path",
    errno.EPERM: "check who may use it with `ls -ld`, or choose another path",
    errno.EROFS: "choose a path on a disk that can be written",
    errno.ENOSPC: "free space on the disk, or choose a path on another one",
    errno.EDQUOT: "free space on the disk, or choose a path on another one",
}


def read_regular(path: Path, limit: int) -> bytes:
    """Read a file that others may have written; links to regular files are followed.

    Raises:
        OSError: it is missing, not a regular file, or has more than ``limit`` bytes.
    """
    return _read(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK), limit)


def read_own(path: Path, limit: int) -> bytes:
    """Read a file that only this user can have written.

    Raises:
        OSError: as `read_regular`; or it is a link, or others own it or may write to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not _is_own(os.fstat(descriptor)):
        os.close(descriptor)
        raise _refusal(errno.EPERM, "another user owns it or may write to it", path)
    return _read(path, descriptor, limit)


def check_regular(path: Path, limit: int) -> None:
    """Raise `OSError` if a file is missing, not a regular file, or too long; links are followed."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(errno.EINVAL, "not a regular file", path)
    if found.st_size > limit:
        raise _refusal(errno.EFBIG, f"{found.st_size} bytes, more than {limit}", path)


def stat_all(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file of a folder, except of those that are removed meanwhile."""
    for path in folder.glob("*"):
        with suppress(OSError):
            yield path.stat()


def check_within(path: Path, folder: Path) -> None:
    """Raise `OSError` if a path of a folder leads out of it.

    The author of a folder could have a file of its user read, and sent to others, by a link. The
    cache of the Hub has `models--org--name/snapshots/REVISION`, with links to the files of that
    repository in `models--org--name/blobs`, which may be a link to such a folder on another disk.
    """
    target, root = path.resolve(), folder.resolve()
    within, repository = [root], root.parent.parent
    if root.parent.name == "snapshots" and repository.name.startswith("models--"):
        blobs = (repository / "blobs").resolve()
        if blobs.parts[-2:] == (repository.name, "blobs"):
            within.append(blobs)
    if not any(target.is_relative_to(each) for each in within):
        raise _refusal(errno.EPERM, "it is a link to a file outside the folder", path)


def is_own(path: Path) -> bool:
    """Return whether a path is a regular file, not a link, that only this user can write to."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and _is_own(found)


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user for writing, with mode 0600 if new; return its descriptor.

    Raises:
        OSError: it cannot be written, is a link, or another user owns it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, 0o600)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise _refusal(errno.EPERM, "it belongs to another user", path)
    return descriptor


@contextmanager
def replacing(path: Path, *, prefix: str = "tmp", suffix: str = "") -> Iterator[BinaryIO]:
    """Write a file with mode 0600 beside a path, which it replaces in one step at the end.

    Without `os.fsync`, a crash of the machine may leave a file without its bytes.

    Raises:
        OSError: it cannot be written; the path is as it was.
    """
    descriptor, name = tempfile.mkstemp(suffix, prefix, path.parent)
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        fresh.replace(path)
    finally:
        with suppress(OSError):  # it is in its place
            fresh.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write a text file in one step, as UTF-8; it keeps its mode, and a link to it stays a link.

    Raises:
        OSError: it cannot be written; it is as it was.
    """
    place = Path(os.path.realpath(path))
    mode = place.stat().st_mode & 0o777 if place.exists() else 0o600
    with replacing(place, prefix=f".{place.name}.") as fresh:
        fresh.write(text.encode())
        fresh.flush()
        os.fsync(fresh.fileno())
        os.fchmod(fresh.fileno(), mode)


def try_lock(file: int) -> bool:
    """Lock an open file for this process until it is closed; return False if another one has it.

    Where the file system has no locks, this is True: nobody can be kept out.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def make_private(folder: Path) -> None:
    """Make a folder accessible to this user only; create it and what is missing above it.

    Raises:
        OSError: it cannot be created, belongs to another user, or is another user's link.
    """
    above = (folder, *folder.parents)
    for missing in reversed([each for each in above if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)  # whatever the umask
    if folder.lstat().st_uid not in {os.geteuid(), 0}:
        raise _refusal(errno.EPERM, "it belongs to another user", folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise _refusal(errno.EPERM, "it belongs to another user", folder)
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be used, without numbers, and without its name, which is known."""
    match error:
        case UnicodeError():
            return "it is not text"
        case OSError(strerror=str(text)):
            # OpenSSL adds its names and its source line: `[SSL] PEM lib (_ssl.c:3895)`.
            plain = re.sub(r"^\[[^\]]*\] | \(_ssl\.c:\d+\)$", "", text)
            return plain if plain[1:2].isupper() else plain[:1].lower() + plain[1:]
        case _:
            return str(error)


def hint_of(error: OSError | ValueError) -> str:
    """Return what a user can do about a file that cannot be used."""
    number = error.errno if isinstance(error, OSError) else None
    return _HINTS.get(number or 0, "check the file, or choose another one")


def _read(path: Path, descriptor: int, limit: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refusal(errno.EINVAL, "not a regular file", path)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _refusal(errno.EFBIG, f"more than {limit} bytes", path)
    return data


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _refusal(number: int, reason: str, path: Path) -> OSError:
    return OSError(number, reason, str(path))


def keep_temporary_files(folder: Path) -> None:
    """Let this process keep its temporary files in a folder if it may write to no usual one.

    Raises:
        OSError: that one cannot be used either.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        make_private(folder)
        tempfile.tempdir = str(folder)
