import pytest

from meshllm.errors import UserError
from meshllm.units import parse_address, parse_share


def test_an_address_is_a_host_and_a_port() -> None:
    assert parse_address("127.0.0.1:7780") == ("127.0.0.1", 7780)
    assert parse_address("[::1]:0") == ("::1", 0)
    for text in (
        "", "7780", ":7780", "host", "host:", "host:x", "host:65536", "::1:7780",
        f"host:{'9' * 5000}",
    ):  # fmt: skip
        with pytest.raises(UserError, match="Invalid address"):
            parse_address(text)


def test_a_share_is_a_percentage() -> None:
    assert (parse_share("50%"), parse_share("100 %"), parse_share("8GiB")) == (0.5, 1.0, None)
    for text in ("%", "0%", "101%", "1.5%", "-1%", f"{'9' * 5000}%"):
        with pytest.raises(UserError, match="Invalid memory share"):
            parse_share(text)
