"""Stateless cookies: proof of return routability for unauthenticated clients.

A cookie is a keyed hash of the source address and the current minute, valid in that minute and the
next. Only a client that receives at the address, or an attacker on the path to it, obtains it.
"""

from collections.abc import Callable
from hmac import compare_digest

from blake3 import blake3

from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import pack_address

WINDOW_S = 60
COOKIE_BYTES = 16


class Cookies:
    """Makes and checks cookies; times are seconds on the driver's clock."""

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self._key = random(32)

    def make(self, source: Address, now: float) -> bytes:
        """Return the cookie of an address for the current window."""
        return self._hash(source, int(now // WINDOW_S))

    def check(self, cookie: bytes, source: Address, now: float) -> bool:
        """Return whether a cookie was made for this address, in this window or the last."""
        window = int(now // WINDOW_S)
        return any(
            compare_digest(cookie, self._hash(source, each)) for each in (window, window - 1)
        )

    def _hash(self, source: Address, window: int) -> bytes:
        data = pack_address(source) + window.to_bytes(8, "big", signed=True)
        return blake3(data, key=self._key).digest(COOKIE_BYTES)
