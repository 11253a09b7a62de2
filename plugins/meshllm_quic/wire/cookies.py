"""Proof that a stranger receives at its address, without a memory of strangers.

A cookie is a keyed hash of the address and of the minute. It serves in that minute and the next,
and nobody else can make one; only who receives at the address, or listens on the way to it, has it.
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
        """Make the cookie of an address for now."""
        return self._hash(source, int(now // WINDOW_S))

    def check(self, cookie: bytes, source: Address, now: float) -> bool:
        """Tell whether a cookie was made for this address, in this window or the last."""
        window = int(now // WINDOW_S)
        return any(
            compare_digest(cookie, self._hash(source, each)) for each in (window, window - 1)
        )

    def _hash(self, source: Address, window: int) -> bytes:
        data = pack_address(source) + window.to_bytes(8, "big", signed=True)
        return blake3(data, key=self._key).digest(COOKIE_BYTES)
