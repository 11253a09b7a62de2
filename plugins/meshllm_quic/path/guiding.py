"""What finds the way of a connection, as the connection sees it."""

from typing import Protocol

from meshllm_quic.wire.routes import Route


class Guiding(Protocol):
    """Who finds the way of a connection."""

    deadline: float | None

    @property
    def reason(self) -> str:
        """Why the route is what it is."""
        ...

    def know(self, *, is_stranger: bool) -> None:
        """Hear whether the other side has still to say who it is."""
        ...

    def hear(self, kind: int, body: bytes) -> None:
        """Take a word of the other side; raise `PeerFault`."""
        ...

    def heard(self, route: Route, now: float) -> None:
        """Note where QUIC was heard from."""
        ...

    def sent(self, now: float) -> None:
        """Note that QUIC sent something."""
        ...

    def expire(self, now: float) -> None:
        """Do what is due."""
        ...

    def end(self) -> None:
        """Do nothing more."""
        ...
