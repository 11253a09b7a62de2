"""The IP addresses of this machine."""

import socket

import psutil  # type: ignore[import-untyped]  # ships no types
import pytest

from meshllm.transport import interfaces


def test_the_default_route_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        isup = True

    class Entry:
        def __init__(self, address: str) -> None:
            self.address = address
            self.family = socket.AF_INET6 if ":" in address else socket.AF_INET

    some = ["127.0.0.1", "10.0.0.1", "fe80::1%eth0", "2001:db8::5", "192.168.0.9"]
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"all": State})
    cards = {"all": [Entry(host) for host in some], "down": [Entry("10.9.9.9")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(interfaces, "_default", {socket.AF_INET: "192.168.0.9"}.get)

    assert interfaces.hosts() == ["192.168.0.9", "10.0.0.1", "2001:db8::5", "127.0.0.1"]
