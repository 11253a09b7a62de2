"""Addresses of listeners and dials."""

import pytest

from meshllm.errors import UserError
from meshllm_websocket import WebsocketTransport, address

pytestmark = pytest.mark.socket


def test_a_wildcard_keeps_its_path() -> None:
    places = address.reachable([("0.0.0.0", 7700), ("::", 7701)], "/mesh")

    assert "ws://127.0.0.1:7700/mesh" in places
    assert all(place.endswith("/mesh") for place in places)


def test_without_interfaces_the_bound_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", dict)

    assert address.reachable([("0.0.0.0", 7700)]) == ("ws://0.0.0.0:7700",)


@pytest.mark.parametrize(
    ("text", "host", "port", "resource"),
    [
        ("ws://10.0.0.7:7700", "10.0.0.7", 7700, "/"),
        ("10.0.0.7:7700", "10.0.0.7", 7700, "/"),
        ("node.example:1", "node.example", 1, "/"),
        ("[fd00::2]:7700", "fd00::2", 7700, "/"),
        ("wss://mesh.example/a/b?c=d", "mesh.example", 443, "/a/b?c=d"),
        ("ws://mesh.example", "mesh.example", 80, "/"),
    ],
)
def test_addresses_are_parsed(text: str, host: str, port: int, resource: str) -> None:
    uri = address.parse(text)

    assert (uri.host, uri.port, uri.resource_name) == (host, port, resource)
    assert uri.secure is text.startswith("wss")


@pytest.mark.parametrize(
    "text",
    [
        "", "7700", "host", "host:", ":7700", "host:port", "host:99999", "host:1/path", "ws://",
        "ws://[::1:7700", "http://host:1", "ws://user@host:1", "ws://user:message@host:1",
        "ws://host:1/#x", "ws://ho st:1", "ws://host:1/a\r\nb", "ws://höst:1", "tcp:host:1",
        "ws://a..b:1", f"ws://{'a' * 64}:1",
    ],
)  # fmt: skip
async def test_invalid_websocket_addresses_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="Invalid WebSocket address"):
        await WebsocketTransport().dial(text)
