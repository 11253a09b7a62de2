"""Who keeps to QUIC and to none of our rules."""

import asyncio
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, QuicEvent
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from meshllm_quic.base.identity import PROTOCOL, Identity
from meshllm_quic.net.network import Address, Network, Socket


def nobody() -> QuicConfiguration:
    """Describe a client without a certificate."""
    return QuicConfiguration(
        is_client=True,
        alpn_protocols=[PROTOCOL],
        verify_mode=ssl.CERT_NONE,
        server_name="meshllm",
        idle_timeout=60.0,
    )


def somebody(seed: bytes = bytes(32)) -> QuicConfiguration:
    """Describe a client with a certificate as it is to be."""
    return Identity(seed).configure(is_client=True)


def rsa_body() -> QuicConfiguration:
    """Describe a client with a key of another kind."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "meshllm")])
    configuration = nobody()
    configuration.private_key = key
    configuration.certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    return configuration


class Damaged:
    """A certificate of a version that nobody knows."""

    def __init__(self, certificate: x509.Certificate) -> None:
        self._whole = certificate

    def public_bytes(self, encoding: Encoding) -> bytes:
        """Write it with another version, [0] 02 01 02 in RFC 5280 section 4.1."""
        third, other = b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x62"
        return self._whole.public_bytes(encoding).replace(third, other, 1)


def damaged() -> QuicConfiguration:
    """Describe a client whose certificate cannot be read."""
    configuration = somebody()
    assert configuration.certificate is not None
    configuration.certificate = Damaged(configuration.certificate)
    return configuration


class Stranger:
    """A stock aioquic client on a network."""

    def __init__(self, to: Address, configuration: QuicConfiguration) -> None:
        self.quic = QuicConnection(configuration=configuration)
        self.to = to
        self.events: list[QuicEvent] = []
        self.sent: list[bytes] = []
        self.heard: list[bytes] = []
        self.socket: Socket
        self._loop = asyncio.get_running_loop()

    @property
    def end(self) -> ConnectionTerminated | None:
        """How the connection ended."""
        return next((e for e in self.events if isinstance(e, ConnectionTerminated)), None)

    async def open(self, network: Network) -> None:
        """Shake hands."""
        self.socket = await network.open(None, 0, self._receive)
        self.quic.connect(self.to, now=self._loop.time())
        await self.live(0.5)

    async def live(self, seconds: float) -> None:
        """Do what QUIC asks for, for a while."""
        end = self._loop.time() + seconds
        while self._loop.time() < end:
            self.transmit()
            await asyncio.sleep(0.01)
            now = self._loop.time()
            if (due := self.quic.get_timer()) is not None and now >= due:
                self.quic.handle_timer(now)
            while (event := self.quic.next_event()) is not None:
                self.events.append(event)

    def transmit(self) -> None:
        for datagram, _ in self.quic.datagrams_to_send(self._loop.time()):
            self.sent.append(datagram)
            self.socket.send([datagram], self.to)

    def _receive(self, batch: Sequence[tuple[bytes, Address]]) -> None:
        for datagram, _ in batch:
            self.heard.append(datagram)
            if datagram[0] & 0x40:
                self.quic.receive_datagram(datagram, self.to, now=self._loop.time())
