"""Reads the prompt from the argument, a pipe, or both."""

import errno
import select
from collections.abc import Callable
from typing import TextIO

from meshllm.errors import UserError
from meshllm.local_files import reason_of

MAX_PIPED_BYTES = 64 << 20  # text of some 16 million tokens: no context is as long
QUIET_S = 2.0  # s


def read_prompt(
    argument: str | None, stdin: TextIO | None, waits: Callable[[], None] = lambda: None
) -> str | None:
    """Join piped text and the argument, in this order; return None for an interactive session.

    ``-`` as the argument means stdin alone. Newlines at the end of piped text are dropped, as
    shells do. Beside an argument, ``waits`` is called where stdin says nothing for `QUIET_S`, such
    as a pipe that a parent process left open.

    Raises:
        UserError: the prompt is empty, too long, not UTF-8, or cannot be read.
    """
    if argument is None and stdin is not None and stdin.isatty():
        return None
    piped = ""
    if stdin is not None and (argument == "-" or not stdin.isatty()):
        if argument not in (None, "-") and not _speaks(stdin):
            waits()
        piped = _read(stdin)
    given = "" if argument in (None, "-") else check_utf8(argument, "The prompt")
    prompt = "\n\n".join(part for part in (piped, given) if part)
    if not prompt.strip():
        raise UserError("The prompt is empty", hint='try `meshllm chat "What is a ring?"`')
    return prompt


def check_utf8(text: str, what: str) -> str:
    """Return a text that a user wrote; raise `UserError` if its bytes were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        place = f"{what} is not UTF-8 at character {error.start}"
        raise UserError(place, hint="set the locale of the terminal to UTF-8") from None
    return text


def _speaks(stdin: TextIO) -> bool:
    """Wait up to `QUIET_S` for the first byte or the end; True too if nothing can wait for it."""
    try:
        return bool(select.select([stdin], [], [], QUIET_S)[0])
    except (OSError, ValueError):
        return True


def _read(stdin: TextIO) -> str:
    try:
        data = stdin.buffer.read(MAX_PIPED_BYTES + 1)
    except OSError as error:
        if error.errno == errno.EBADF:  # not open for reading: `nohup` leaves it so
            return ""
        raise UserError(f"Standard input cannot be read: {reason_of(error)}") from None
    if len(data) > MAX_PIPED_BYTES:
        raise UserError(
            f"Standard input has more than {MAX_PIPED_BYTES} bytes",
            hint="pipe in a part of it, such as `head -c 100000 FILE`",
        )
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Standard input is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert it first: `iconv -f latin1 -t utf-8`",
        ) from None
