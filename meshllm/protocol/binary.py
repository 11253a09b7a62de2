"""Fields of bytes with a limit each: write them, read them back."""

from struct import Struct
from typing import Any

from meshllm.errors import PeerFault

RECORD_VERSION = 1
"""The first byte of every record; a later one only adds fields behind those that are known."""

_LENGTH = Struct("<H")


def sized(data: bytes) -> bytes:
    """Write bytes behind their length, which is at most 65535."""
    return _LENGTH.pack(len(data)) + data


def start_record() -> bytes:
    """Write what stands before the fields of a record."""
    return bytes([RECORD_VERSION])


def open_record(data: bytes, name: str) -> "Reader":
    """Read the fields of a record of this version or a later one, whose other fields are left."""
    reader = Reader(data, name)
    reader.version = reader.bounded("as version", reader.take(1)[0], 1, 255)
    return reader


class Reader:
    """Reads fields one after the other; every way to be wrong is a `PeerFault`."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._at = 0
        self._name = name
        self.version = RECORD_VERSION
        """Of the record that is read."""

    def take(self, size: int) -> bytes:
        """Read exactly so many bytes."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise PeerFault(f"{self._name} of {len(self._data)} bytes ends too early")
        return self._data[start : self._at]

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        """Read the fields of a layout."""
        return layout.unpack(self.take(layout.size))

    def sized(self, limit: int) -> bytes:
        """Read what `sized` wrote, at most ``limit`` bytes."""
        (length,) = self.unpack(_LENGTH)
        return self.take(self.bounded("bytes", length, 0, limit))

    def text(self, limit: int) -> str:
        """Read UTF-8 that `sized` wrote, at most ``limit`` bytes."""
        data = self.sized(limit)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise PeerFault(f"{self._name} with {len(data)} bytes that are no UTF-8") from None

    def bounded(self, name: str, value: float, low: float, high: float) -> Any:
        """Return a number within its limits; NaN is not."""
        if not low <= value <= high:
            raise PeerFault(f"{self._name} with {value} {name}; allowed are {low} to {high}")
        return value

    @property
    def left(self) -> int:
        """Count the bytes that were not read."""
        return len(self._data) - self._at

    def rest(self, limit: int) -> bytes:
        """Read all that is left, at most ``limit`` bytes."""
        return self.take(self.bounded("bytes", self.left, 0, limit))
