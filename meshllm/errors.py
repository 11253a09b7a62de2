"""The error tree.

::

    MeshError            1  something expected went wrong
      UserError          2  you can fix it
      LinkLost           3  a peer is gone, nobody's fault
      ModelError         4  the model is not found, not supported or does not fit
        OutOfMemory      4  an allocation failed
      NotAuthorised      5  the other side refuses who you are
      TimedOut           6  a deadline passed
      PeerFault          7  a peer broke the rules
        IntegrityFault   7  bytes are not what their hash says
      PluginError        1  a transport plugin is missing or broken
      Busy               8  there is no room now: ask again later

The number is the exit code of the command. A bug is no ``MeshError`` and keeps its traceback.
"""

from typing import ClassVar


class MeshError(Exception):
    """An expected failure: what happened, to which thing, and what to do about it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UserError(MeshError):
    """A request that its author can correct."""

    exit_code = 2


class LinkLost(MeshError):
    """The other side of a link is gone and everything it sent was read."""

    exit_code = 3


class ModelError(MeshError):
    """A model that is not found, not supported, damaged, or too large."""

    exit_code = 4


class OutOfMemory(ModelError):
    """The memory that is free here does not hold what was to be loaded."""

    def __init__(self, message: str, *, hint: str | None = None, needed_bytes: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        """At least."""


class NotAuthorised(MeshError):
    """The other side does not accept who we are."""

    exit_code = 5


class TimedOut(MeshError):
    """A deadline passed before the work was done."""

    exit_code = 6


class PeerFault(MeshError):
    """A peer sent what the rules forbid; its link is to be dropped."""

    exit_code = 7


class IntegrityFault(PeerFault):
    """Bytes that are not what their hash says."""


class PluginError(MeshError):
    """A transport plugin that is missing, broken or named twice."""


class Busy(MeshError):
    """There is no room for a request now; the same one may be served later."""

    exit_code = 8
