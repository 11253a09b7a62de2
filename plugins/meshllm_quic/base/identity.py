"""Who a node is towards TLS: a certificate made of its key.

Both sides show a certificate that nobody else signed: what counts is the key in it, of which TLS
proves the possession. Names, dates and chains in it are not looked at.
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
"""Negotiated by ALPN; the number changes when the words on the streams do."""
SERVER_NAME = "meshllm"
IDLE_S = 30.0
"""A connection that heard nothing for so long is lost; three times as long as it keeps silent."""
STRANGER_WINDOW = 64 * 1024
"""Bytes that a stream may hold before anybody took the link."""

_SINCE = datetime(2000, 1, 1, tzinfo=UTC)  # for clocks that are wrong
_UNTIL = datetime(2199, 12, 31, tzinfo=UTC)


class Identity:
    """The key of a node and its certificate."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.key = self._key.public_key().public_bytes_raw()
        self.certificate = _certify(self._key)

    @property
    def tag(self) -> Tag:
        """What a relay calls this node."""
        return self.key[:TAG_BYTES]

    def sign(self, data: bytes) -> bytes:
        """Sign what begins with a label of its own."""
        return self._key.sign(data)

    def configure(self, *, is_client: bool) -> QuicConfiguration:
        """Describe a connection."""
        configuration = QuicConfiguration(
            alpn_protocols=[PROTOCOL],
            cipher_suites=[
                CipherSuite.AES_128_GCM_SHA256,  # fastest where the processor helps
                CipherSuite.CHACHA20_POLY1305_SHA256,
            ],
            congestion_control_algorithm=NAME,
            idle_timeout=IDLE_S,
            is_client=is_client,
            max_data=2 * STRANGER_WINDOW,
            max_stream_data=STRANGER_WINDOW,
            server_name=SERVER_NAME if is_client else None,
            supported_versions=[QuicProtocolVersion.VERSION_1],
            verify_mode=ssl.CERT_NONE,  # TLS checks the signature all the same
        )
        configuration.certificate = self.certificate
        configuration.private_key = self._key
        return configuration


def certified_key(certificate: x509.Certificate | None) -> bytes | None:
    """Return the Ed25519 key of a certificate; None where there is none."""
    if certificate is None:
        return None
    try:
        key = certificate.public_key()
    except ValueError:  # of a kind that the library does not know, or damaged
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
