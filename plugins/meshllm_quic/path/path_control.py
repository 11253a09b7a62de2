"""Interface between a connection and the driver of its path selection."""

from typing import Protocol

from meshllm_quic.wire.routes import Route, ViaRelay


class PathControl(Protocol):
    """Selects the route of a connection."""

    deadline: float | None
    backup: ViaRelay | None
    """A relay that reaches the peer."""

    @property
    def reason(self) -> str:
        """Why the route is what it is."""
        ...

    def note_authentication(self, *, is_authenticated: bool) -> None:
        """Note whether the peer is authenticated."""
        ...

    def receive_record(self, kind: int, body: bytes) -> None:
        """Handle an OFFER or ANSWER record; raise `PeerFault`."""
        ...

    def heard(self, route: Route, now: float) -> None:
        """Note a received QUIC datagram and its route."""
        ...

    def sent(self, now: float) -> None:
        """Note that QUIC sent a datagram."""
        ...

    def expire(self, now: float) -> None:
        """Handle the deadline."""
        ...

    def end(self) -> None:
        """Stop."""
        ...
