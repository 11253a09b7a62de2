"""Parts are written at once, or together at the end of a context."""

import pytest

from meshllm.transport.gathering import MAX_BYTES, Gathering


def test_parts_are_written_one_by_one_unless_they_are_gathered() -> None:
    written = list[bytes]()
    gathering = Gathering(written.append)

    gathering.write(b"a")
    with gathering.together():
        gathering.write(b"b")
        with gathering.together():
            gathering.write(b"c")
        gathering.write(b"d")
        assert written == [b"a"]
    gathering.write(b"e")

    assert written == [b"a", b"bcd", b"e"]


def test_nothing_is_written_if_nothing_was_gathered() -> None:
    written = list[bytes]()

    with Gathering(written.append).together():
        pass

    assert not written


def test_many_bytes_are_not_gathered() -> None:
    written, part = list[bytes](), bytes(MAX_BYTES)
    gathering = Gathering(written.append)

    with gathering.together():
        gathering.write(part)
        gathering.write(b"b")
        assert written == [part + b"b"]
        gathering.write(b"c")

    assert written == [part + b"b", b"c"]


def test_what_was_gathered_before_an_error_is_written() -> None:
    written = list[bytes]()
    gathering = Gathering(written.append)

    def fail() -> None:
        with gathering.together():
            gathering.write(b"a")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    gathering.write(b"b")

    assert written == [b"a", b"b"]
