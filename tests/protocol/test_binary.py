"""Binary fields: round trips, limits and malformed input."""

from math import nan
from struct import Struct

import pytest

from meshllm.errors import PeerFault
from meshllm.protocol.binary import Reader, open_record, sized, start_record


def test_fields_are_read_in_order() -> None:
    reader = Reader(b"\x07" + sized(b"abc") + sized("ä".encode()) + b"rest", "Thing")

    assert reader.unpack(Struct("<B")) == (7,)
    assert reader.sized(3) == b"abc"
    assert reader.text(2) == "ä"
    assert reader.left == 4
    assert reader.rest(4) == b"rest"


def test_a_truncated_field_is_refused() -> None:
    with pytest.raises(PeerFault, match="Thing of 3 bytes is truncated"):
        Reader(b"abc", "Thing").take(4)


def test_more_bytes_than_the_limit_are_refused() -> None:
    with pytest.raises(PeerFault, match="Thing with 4 bytes; allowed are 0 to 3"):
        Reader(sized(b"abcd"), "Thing").sized(3)


def test_invalid_utf8_is_refused() -> None:
    with pytest.raises(PeerFault, match="Thing with 1 bytes of invalid UTF-8"):
        Reader(sized(b"\xff"), "Thing").text(9)


@pytest.mark.parametrize("number", [-1, 11, nan])
def test_a_number_outside_its_limits_is_refused(number: float) -> None:
    with pytest.raises(PeerFault, match="apples; allowed are 0 to 10"):
        Reader(b"", "Thing").bounded("apples", number, 0, 10)


def test_appended_fields_of_a_record_are_left_unread() -> None:
    assert open_record(start_record(), "Thing").version == 1
    assert open_record(b"\x09", "Thing").version == 9

    with pytest.raises(PeerFault, match="Thing with 0 as version"):
        open_record(b"\x00", "Thing")
