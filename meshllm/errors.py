"""The error tree.

::

    MeshError            1  something expected went wrong
      UserError          2  you can fix it
        ContextTooLong   2  prompt and answer exceed the context
      LinkLost           3  the connection to a peer is lost; retry
      ModelError         4  the model is not found, not supported or too large
        DamagedFile      4  the content of a file of weights is damaged
        ModelMissing     4  the model is not on this machine, or nothing serves it
        OutOfMemory      4  an allocation failed
      NotAuthorised      5  the peer rejects this node's credential
      TimedOut           6  a deadline passed
        NotServed        6  no ring served the model in time; it may later
      PeerFault          7  a peer violated the protocol
        IntegrityFault   7  bytes do not match their hash
      PluginError        1  a transport plugin is missing or broken
      Busy               8  no capacity now; retry later
        Leaving          8  this node is leaving the mesh; ask another
        QuotaUsed        8  the tokens of a day are used or reserved

The number is the exit code of the command. A bug is not a ``MeshError`` and keeps its traceback.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar


class MeshError(Exception):
    """An expected failure; the message says what happened, the hint what to do about it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UserError(MeshError):
    """Invalid input that the user can correct."""

    exit_code = 2


class ContextTooLong(UserError):
    """The prompt and its answer exceed the context of the model, or the memory for it."""


class LinkLost(MeshError):
    """The peer closed the link or is unreachable, and everything it sent was read."""

    exit_code = 3


class ModelError(MeshError):
    """A model is not found, not supported, corrupt, or too large."""

    exit_code = 4


class DamagedFile(ModelError):
    """The content of a file of weights is damaged: reading it again cannot help."""


class ModelMissing(ModelError):
    """A model is not on this machine, or nothing serves it."""


class OutOfMemory(ModelError):
    """Not enough free memory for what was to be loaded."""

    def __init__(self, message: str, *, hint: str | None = None, needed_bytes: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        """Lower bound; 0 if unknown."""


class NotAuthorised(MeshError):
    """The peer does not accept this node's credential."""

    exit_code = 5


class TimedOut(MeshError):
    """A deadline passed before the work was done."""

    exit_code = 6


class NotServed(TimedOut):
    """No ring served the model of a request in time; one may later."""

    def __init__(self, message: str, *, hint: str | None = None, retry_s: int) -> None:
        super().__init__(message, hint=hint)
        self.retry_s = retry_s
        """Estimated seconds until one does."""


class PeerFault(MeshError):
    """A peer violated the protocol; its link must be dropped."""

    exit_code = 7


class IntegrityFault(PeerFault):
    """Bytes do not match their hash."""


class PluginError(MeshError):
    """A transport plugin is missing, broken or ambiguous."""


class Busy(MeshError):
    """No capacity for a request now; a retry may succeed."""

    exit_code = 8


class Leaving(Busy):
    """This node is leaving the mesh; other nodes serve on."""


class QuotaUsed(Busy):
    """The tokens that a client may use in a day are used or reserved."""

    def __init__(self, message: str, *, hint: str | None = None, retry_s: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.retry_s = retry_s
        """Seconds until tokens are free, if no request ends early."""


@contextmanager
def foreign_code(
    describe: Callable[[Exception], MeshError],
    *,
    expected: tuple[type[Exception], ...] = (MeshError,),
) -> Iterator[None]:
    """Replace what third-party code raises, which may be anything, by an error of ours.

    What is ``expected`` of it stays, such as a `MemoryError` where that is not a bug.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, expected):
            raise
        raise describe(error) from error


def cannot_listen(address: str, error: OSError) -> UserError:
    """Return the error of a socket that cannot be bound, in the words of the system."""
    code = error.errno or 0  # resolver errors are negative
    if "could not bind on any address" in str(error):  # asyncio and uvloop, without a number
        code = errno.EADDRNOTAVAIL
    # asyncio puts the address and its own words into the text of the error.
    reason = os.strerror(code) if code > 0 else error.strerror or str(error) or "unknown error"
    return UserError(
        f"Cannot listen on `{address}`: {reason[:1].lower()}{reason[1:]}",
        hint="choose another port, or an address of this machine",
    )
