"""Lookup of connections by QUIC connection id."""

from collections.abc import Iterator

from meshllm_quic.link.admission import ID_BYTES
from meshllm_quic.link.connection import Connection

MAX_CLOSED = 1024
"""Closed ids whose CONNECTION_CLOSE datagram is kept, for peers that missed it."""
MAX_CLOSE_REPEATS = 8
"""How often it is sent again."""


class ConnectionTable:
    """Connections by the connection ids that peers send to."""

    def __init__(self) -> None:
        self._connections: dict[bytes, Connection] = {}
        self._ids: dict[Connection, set[bytes]] = {}
        self._closed: dict[bytes, tuple[bytes, int]] = {}
        """By id: the CONNECTION_CLOSE datagram, and how often it may still be sent."""

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._ids))

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._ids

    def add(self, connection: Connection, *ids: bytes) -> None:
        """Add a connection, or more ids of a known one."""
        self._ids.setdefault(connection, set()).update(ids)
        for each in ids:
            self._connections[each] = connection

    def drop(self, connection_id: bytes) -> None:
        """Remove an id."""
        if (connection := self._connections.pop(connection_id, None)) is not None:
            self._ids[connection].discard(connection_id)

    def remove(self, connection: Connection) -> None:
        """Remove a connection, but keep its CONNECTION_CLOSE datagram."""
        for each in self._ids.pop(connection, ()):
            self._connections.pop(each, None)
            self._closed[each] = connection.close_datagram, MAX_CLOSE_REPEATS
        while len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def find(self, connection_id: bytes) -> Connection | None:
        """Return the connection of an id; None if there is none."""
        return self._connections.get(connection_id)

    def close_datagram(self, connection_id: bytes, most: int) -> bytes | None:
        """Return the datagram to send for an id of a closed connection, of at most ``most`` bytes.

        Empty: send nothing; None: the id is unknown.
        """
        if connection_id not in self._closed:
            return None
        datagram, left = self._closed[connection_id]
        if not left or len(datagram) > most:
            return b""
        self._closed[connection_id] = datagram, left - 1
        return datagram


def destination(datagram: bytes) -> bytes:
    """Return the destination connection id of a QUIC datagram, RFC 8999 section 5."""
    if not datagram[0] & 0x80:
        return datagram[1 : 1 + ID_BYTES]
    return datagram[6 : 6 + datagram[5]] if len(datagram) > 5 else b""
