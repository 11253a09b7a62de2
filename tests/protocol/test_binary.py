"""Fields of bytes: what was written is read, and nothing else."""

from math import nan
from struct import Struct

import pytest

from meshllm.errors import PeerFault
from meshllm.protocol.binary import Reader, open_record, sized, start_record


def test_fields_come_back_in_order() -> None:
    reader = Reader(b"\x07" + sized(b"abc") + sized("ä".encode()) + b"rest", "Thing")

    assert reader.unpack(Struct("<B")) == (7,)
    assert reader.sized(3) == b"abc"
    assert reader.text(2) == "ä"
    assert reader.left == 4
    assert reader.rest(4) == b"rest"


def test_a_field_that_is_not_all_there_is_refused() -> None:
    with pytest.raises(PeerFault, match="Thing of 3 bytes ends too early"):
        Reader(b"abc", "Thing").take(4)


def test_more_bytes_than_the_limit_are_refused() -> None:
    with pytest.raises(PeerFault, match="Thing with 4 bytes; allowed are 0 to 3"):
        Reader(sized(b"abcd"), "Thing").sized(3)


def test_a_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(PeerFault, match="Thing with 1 bytes that are no UTF-8"):
        Reader(sized(b"\xff"), "Thing").text(9)


@pytest.mark.parametrize("number", [-1, 11, nan])
def test_a_number_outside_its_limits_is_refused(number: float) -> None:
    with pytest.raises(PeerFault, match="apples; allowed are 0 to 10"):
        Reader(b"", "Thing").bounded("apples", number, 0, 10)


def test_a_record_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert open_record(start_record(), "Thing").version == 1
    assert open_record(b"\x09", "Thing").version == 9

    with pytest.raises(PeerFault, match="Thing with 0 as version"):
        open_record(b"\x00", "Thing")
