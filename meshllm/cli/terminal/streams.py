"""Standard streams that are closed, broken or full.

It imports nothing of ours: completion, which must be fast, needs it.
"""

import os
import sys
from typing import TextIO


def open_closed() -> None:
    """Open those of stdin, stdout and stderr that are closed, on `/dev/null`.

    The next file or socket would get the number of a closed stderr, and with it what libraries
    write there; and `print` would write messages to stdout.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # it takes the lowest free number
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", errors="backslashreplace")


def flush_last() -> None:
    """Flush both for the last time: a failure of Python's own flush would change the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # stdout may be closed
        try:
            stream.flush()
        except OSError:
            discard(stream)


def discard(stream: TextIO) -> None:
    """Let a stream that cannot be written write to nowhere, also when Python flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
