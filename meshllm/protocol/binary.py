"""Length-prefixed and packed binary fields, read with a limit on each."""

from struct import Struct
from typing import Any

from meshllm.errors import PeerFault

RECORD_VERSION = 1
"""The first byte of every record; a later version only appends fields."""

_LENGTH = Struct("<H")


def sized(data: bytes) -> bytes:
    """Prefix bytes with their length, at most 65535."""
    return _LENGTH.pack(len(data)) + data


def micros(seconds: float) -> int:
    """Return a time in whole microseconds, as fields have it."""
    return round(seconds * 1e6)


def start_record() -> bytes:
    """Return the header of a record: its version byte."""
    return bytes([RECORD_VERSION])


def open_record(data: bytes, name: str) -> "Reader":
    """Start reading a record; fields that a later version appended are left unread."""
    reader = Reader(data, name)
    reader.version = reader.bounded("as version", reader.take(1)[0], 1, 255)
    return reader


class Reader:
    """Sequential reader of binary fields; malformed input raises `PeerFault`."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._at = 0
        self._name = name
        self.version = RECORD_VERSION
        """Version of the record, set by `open_record`."""

    def take(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise PeerFault(f"{self._name} of {len(self._data)} bytes is truncated")
        return self._data[start : self._at]

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        """Read one packed struct."""
        return layout.unpack(self.take(layout.size))

    def sized(self, limit: int) -> bytes:
        """Read a length-prefixed field of at most ``limit`` bytes."""
        (length,) = self.unpack(_LENGTH)
        return self.take(self.bounded("bytes", length, 0, limit))

    def text(self, limit: int) -> str:
        """Read a length-prefixed UTF-8 field of at most ``limit`` bytes."""
        data = self.sized(limit)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise PeerFault(f"{self._name} with {len(data)} bytes of invalid UTF-8") from None

    def bounded(self, name: str, value: float, low: float, high: float) -> Any:
        """Return ``value`` if it is within its limits; NaN never is."""
        if not low <= value <= high:
            raise PeerFault(f"{self._name} with {value} {name}; allowed are {low} to {high}")
        return value

    @property
    def left(self) -> int:
        """Return the number of unread bytes."""
        return len(self._data) - self._at

    def rest(self, limit: int) -> bytes:
        """Read all remaining bytes, at most ``limit``."""
        return self.take(self.bounded("bytes", self.left, 0, limit))
