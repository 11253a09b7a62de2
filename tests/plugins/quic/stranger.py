"""A client that speaks QUIC and ignores the rules of the transport."""

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
from meshllm_quic.net.network import Address, DatagramNetwork, Socket


def nobody() -> QuicConfiguration:
    """Configure a client without a certificate."""
    return QuicConfiguration(
        is_client=True,
        alpn_protocols=[PROTOCOL],
        verify_mode=ssl.CERT_NONE,
        server_name="meshllm",
        idle_timeout=60.0,
    )


def somebody(seed: bytes = bytes(32)) -> QuicConfiguration:
    """Configure a client with a valid certificate."""
    return Identity(seed).configure(is_client=True)


def rsa_body() -> QuicConfiguration:
    """Configure a client with an RSA key."""
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
    """A certificate of an unknown version."""

    def __init__(self, certificate: x509.Certificate) -> None:
        self._whole = certificate

    def public_bytes(self, encoding: Encoding) -> bytes:
        """Encode it with another version, [0] 02 01 02 in RFC 5280 section 4.1."""
        third, other = b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x62"
        return self._whole.public_bytes(encoding).replace(third, other, 1)


def damaged() -> QuicConfiguration:
    """Configure a client with an unreadable certificate."""
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

    async def open(self, network: DatagramNetwork) -> None:
        """Start the handshake."""
        self.socket = await network.open(None, 0, self._receive)
        self.quic.connect(self.to, now=self._loop.time())
        await self.live(0.5)

    async def live(self, seconds: float) -> None:
        """Run the connection's timers for a while."""
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
