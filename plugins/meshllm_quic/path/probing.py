"""Authenticated path probes.

Both sides share the key of the path and derive one key per direction from it, so a reflected probe
or reply is invalid. A nonce is valid for one reply, from the address that it was sent to, for a few
seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest

from blake3 import blake3

from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import Probe, ProbeReply

MAX_NONCES = 512  # about 24 candidates at 5 probes per second for NONCE_S
NONCE_S = 5.0
NONCE_BYTES = 8
MAC_BYTES = 16
ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sent:
    """A probe that awaits its reply."""

    to: Address
    at: float
    length: int


class Probing:
    """The probes and answers of one path; times are seconds on the driver's clock."""

    def __init__(self, key: bytes, random: Callable[[int], bytes], *, is_dialer: bool) -> None:
        keys = [blake3(role, key=key).digest() for role in (b"dialer", b"listener")]
        self._ours, self._theirs = keys if is_dialer else reversed(keys)
        self.id = blake3(key).digest(ID_BYTES)
        self._random = random
        self._sent: dict[bytes, Sent] = {}

    def probe(self, to: Address, now: float, length: int = Probe.SIZE) -> Probe:
        """Return a probe of ``length`` bytes, and remember its nonce."""
        nonce = self._random(NONCE_BYTES)
        if len(self._sent) >= MAX_NONCES:
            del self._sent[next(iter(self._sent))]
        self._sent[nonce] = Sent(to, now, length)
        return Probe(self.id, nonce, self._seal(Probe(self.id, nonce).sealed), length)

    def is_theirs(self, probe: Probe) -> bool:
        """Return whether the peer made the probe."""
        return probe.path == self.id and compare_digest(_mac(self._theirs, probe.sealed), probe.mac)

    def answer(self, probe: Probe, source: Address) -> ProbeReply:
        """Return the reply to a probe from ``source``."""
        blank = ProbeReply(self.id, probe.nonce, source, probe.length)
        return ProbeReply(self.id, probe.nonce, source, probe.length, self._seal(blank.sealed))

    def match(self, answer: ProbeReply, source: Address, now: float) -> Sent | None:
        """Return the probe of this reply; None if the reply is invalid, late or a duplicate."""
        sent = self._sent.get(answer.nonce)
        if sent is None or sent.to != source or now > sent.at + NONCE_S:
            return None
        if not compare_digest(_mac(self._theirs, answer.sealed), answer.mac):
            return None
        return self._sent.pop(answer.nonce)

    def _seal(self, data: bytes) -> bytes:
        return _mac(self._ours, data)


def _mac(key: bytes, data: bytes) -> bytes:
    return blake3(data, key=key).digest(MAC_BYTES)
