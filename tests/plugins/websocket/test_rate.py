"""Delivery rate of a connection, as reported by the kernel."""

import socket
import sys
from struct import pack

import pytest

from meshllm_websocket.rate import delivery_rate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


class FakeSocket(socket.socket):
    """Returns one fixed answer."""

    answer: bytes | None = None

    def getsockopt(self, *_: int) -> bytes:  # type: ignore[override]  # one of three signatures
        if self.answer is None:
            raise OSError("closed")
        return self.answer


def rate_of(answer: bytes | None) -> float | None:
    with FakeSocket() as fake:
        fake.answer = answer
        return delivery_rate(fake)


def info(flags: int, rate: int) -> bytes:
    return pack("<7sB152sQ", b"\xff" * 7, flags, b"\xff" * 152, rate)


def test_a_closed_tls_connection_has_no_rate() -> None:
    assert delivery_rate(None) is None  # what asyncio returns as its socket


def test_the_rate_excludes_application_limited_periods() -> None:
    assert rate_of(info(0, 1_250_000)) == 1.25e6
    assert rate_of(info(0b110, 1_250_000)) == 1.25e6  # the other flags of this byte


@pytest.mark.parametrize(
    "answer",
    [info(1, 1_250_000), info(0, 0), info(0, 9)[:104], b"", None],
    ids=["too little to send", "no rate yet", "an old kernel", "nothing", "closed"],
)
def test_an_unavailable_rate_is_none(answer: bytes | None) -> None:
    assert rate_of(answer) is None


@pytest.mark.socket
def test_a_saturated_connection_has_a_rate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            assert delivery_rate(one) is None
            one.setblocking(False)
            for _ in range(200):
                while True:
                    try:
                        one.send(bytes(1 << 18))
                    except BlockingIOError:
                        break
                other.recv(1 << 18)

            assert delivery_rate(one)
        assert delivery_rate(one) is None
