"""The TLS identity of a node: a self-signed certificate of its Ed25519 key.

Both sides present a self-signed certificate; only the key in it counts, and TLS proves its
possession. Names, dates and chains are ignored.
"""

import ssl
from datetime import UTC, datetime

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.tls import CipherSuite
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from meshllm_quic.base.congestion import NAME
from meshllm_quic.wire.packets import TAG_BYTES, Tag

KEY_BYTES = 32
PROTOCOL = "meshllm/1"
"""ALPN protocol; the number is the version of the records on the streams."""
SERVER_NAME = "meshllm"
IDLE_S = 30.0
"""Idle timeout of a connection: three keep-alive intervals."""
UNAUTHENTICATED_WINDOW = 64 * 1024
"""Flow-control window of a stream until its peer counts as authenticated."""

_SINCE = datetime(2000, 1, 1, tzinfo=UTC)  # tolerates wrong clocks
_UNTIL = datetime(2199, 12, 31, tzinfo=UTC)


class Identity:
    """The key of a node and its certificate."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.key = self._key.public_key().public_bytes_raw()
        self.certificate = _certify(self._key)

    @property
    def tag(self) -> Tag:
        """The short id of this node at relays."""
        return self.key[:TAG_BYTES]

    def sign(self, data: bytes) -> bytes:
        """Sign data; it must start with a label that is unique to its purpose."""
        return self._key.sign(data)

    def configure(self, *, is_client: bool) -> QuicConfiguration:
        """Return the configuration of a connection."""
        configuration = QuicConfiguration(
            alpn_protocols=[PROTOCOL],
            cipher_suites=[
                CipherSuite.AES_128_GCM_SHA256,  # fastest with AES instructions
                CipherSuite.CHACHA20_POLY1305_SHA256,
            ],
            congestion_control_algorithm=NAME,
            idle_timeout=IDLE_S,
            is_client=is_client,
            max_data=2 * UNAUTHENTICATED_WINDOW,
            max_stream_data=UNAUTHENTICATED_WINDOW,
            server_name=SERVER_NAME if is_client else None,
            supported_versions=[QuicProtocolVersion.VERSION_1],
            verify_mode=ssl.CERT_NONE,  # TLS still verifies the peer's signature
        )
        configuration.certificate = self.certificate
        configuration.private_key = self._key
        return configuration


def certified_key(certificate: x509.Certificate | None) -> bytes | None:
    """Return the Ed25519 key of a certificate; None if there is none."""
    if certificate is None:
        return None
    try:
        key = certificate.public_key()
    except ValueError:  # an unsupported key type, or malformed
        return None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else None


def _certify(key: Ed25519PrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, algorithm=None)
    )
