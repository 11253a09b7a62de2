"""Parsing and formatting of addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import UserError
from meshllm.names import NodeId, show
from meshllm_quic.net.address import QuicAddress, parse, show_key

KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("quic://10.0.0.7:7700", QuicAddress("10.0.0.7", 7700)),
        ("10.0.0.7:7700", QuicAddress("10.0.0.7", 7700)),
        ("quic://[2001:db8::7]:7700", QuicAddress("2001:db8::7", 7700)),
        ("quic://relay.example:8790", QuicAddress("relay.example", 8790)),
        (f"quic://{show_key(KEY)}@relay.example:8790", QuicAddress("relay.example", 8790, KEY)),
        (f"quic://{show(NodeId(KEY))}@relay.example:1", QuicAddress("relay.example", 1, KEY)),
    ],
)
def test_an_address_is_parsed(text: str, place: QuicAddress) -> None:
    assert parse(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.7",
        "quic://10.0.0.7",
        "ws://10.0.0.7:7700",
        "quic://10.0.0.7:77000",
        "quic://10.0.0.7:7700/path",
        "quic://10.0.0.7:7700?query",
        "quic://user:secret@10.0.0.7:7700",
        "quic://[2001:db8::7:7700",
        "quic://a host:7700",
        "quic://é:7700",
        f"quic://{show_key(KEY)[:-1]}@relay.example:8790",
        f"quic://{show_key(KEY)[:-1]}a@relay.example:8790",
        "quic://@relay.example:8790",
    ],
)
def test_invalid_quic_addresses_are_rejected(text: str) -> None:
    with pytest.raises(UserError):
        parse(text)


@given(key=st.binary(min_size=32, max_size=32))
def test_a_key_is_formatted_like_a_node_id(key: bytes) -> None:
    assert show_key(key) == show(NodeId(key)).replace("-", "")
    assert parse(str(QuicAddress("::1", 1, key))) == QuicAddress("::1", 1, key)


@given(text=st.text(max_size=120))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    try:
        place = parse(f"quic://{text}")
    except UserError:
        return
    assert parse(str(place)) == place


def test_a_default_port_may_be_omitted() -> None:
    assert parse("relay.example", 8790) == QuicAddress("relay.example", 8790)
    assert parse("quic://[2001:db8::1]", 8790) == QuicAddress("2001:db8::1", 8790)
    assert parse("relay.example:443", 8790) == QuicAddress("relay.example", 443)
