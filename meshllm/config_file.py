"""Writes the files that `meshllm.config` reads: what is set is validated, a file is replaced in one
step."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import tomli_w

from meshllm.config import Scalar, check_file, check_place, keys, parse, read_file
from meshllm.errors import UserError
from meshllm.local_files import hint_of, replace_text


def put(path: Path, name: str, text: str) -> Scalar:
    """Set one setting in a file, and return its value; comments of the file are not kept.

    Others are left as they are, invalid ones too: they may be repaired one by one.

    Raises:
        UserError: an unknown name, an invalid value, or a file that cannot be read or written.
    """
    check_place(name, path)
    value = parse(name, text, str(path))
    with _alone(path):
        _replace(path, tomli_w.dumps({**read_file(path), name: value}))
    return value


def drop(path: Path, name: str) -> None:
    """Remove one setting from a file; comments of the file are not kept.

    Raises:
        UserError: the file does not set it, or cannot be read or written.
    """
    with _alone(path):
        values = read_file(path)
        if name not in values:
            close = get_close_matches(name, values, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "see `meshllm config show --origin`"
            raise UserError(f"`{path}` does not set `{name}`", hint=hint)
        del values[name]
        _replace(path, tomli_w.dumps(values))


def write(path: Path, text: str) -> None:
    """Replace a file by a valid one; a link to a file stays a link.

    Raises:
        UserError: a setting is unknown, invalid, or not allowed there; the file cannot be written.
    """
    check_file(path, text)
    _replace(path, text)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other commands from changing the files of a folder meanwhile, if it is there."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError:  # it is made by `_replace`, or the reason why that fails
        yield
        return
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise UserError(
            f"`{path}` cannot be written: {error.strerror}",
            hint=f"{hint_of(error)}; flags and variables such as `MESHLLM_MODEL` need no file",
        ) from None


def template(meanings: Mapping[str, str]) -> str:
    """Return a file that sets nothing, with each setting, its meaning and default in a comment."""
    lines = ["# Settings of meshllm; remove the `#` in front of a setting to change it.", ""]
    for name, key in keys().items():
        default = getattr(key.owner(), name)
        value = tomli_w.dumps({name: default}).strip() if default is not None else f'{name} = ""'
        lines += [f"# {meanings[name]}", f"# {value}", ""]
    return "\n".join(lines)
