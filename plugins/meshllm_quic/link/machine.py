"""aioquic's `QuicConnection`, extended for meshllm.

All uses of private attributes of aioquic are here and in `congestion`; its version is pinned, and
each use is covered by a test. The extensions:

- The server requests a client certificate; `peer_key` is the key in it.
- Flow control gives backpressure: aioquic enlarges its windows even if the application does not
  read; here the application grants every byte, by `grant`.
- Only the client opens streams, exactly two: one per channel.
- A stream that arrives in tiny pieces ends the connection: aioquic searches all of them, for each.
- So does a handshake message that begins far ahead, as aioquic allocates the hole before it, or
  that does not end: aioquic keeps and copies all of it.
- A Retry packet with a long token is ignored: aioquic could send nothing any more.
- The keys are updated before they have encrypted more packets than is safe.
"""

import logging
from typing import Any, Final

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    CONNECTION_LIMIT_FRAME_CAPACITY,
    END_STATES,
    MAX_STREAM_DATA_FRAME_CAPACITY,
    Limit,
    NetworkAddress,
    QuicConnection,
    QuicConnectionError,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicHeader
from aioquic.quic.packet_builder import QuicPacketBuilder, QuicPacketBuilderStop
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream, QuicStreamReceiver
from aioquic.tls import Epoch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509 import InvalidVersion

from meshllm.errors import PeerFault
from meshllm.transport.contract import Buffer, Channel
from meshllm_quic.base.congestion import reset_path
from meshllm_quic.base.identity import certified_key

STREAMS: Final = {Channel.CONTROL: 0, Channel.DATA: 4}
"""Client-initiated bidirectional streams, RFC 9000 section 2.1."""
PEER: Final = ("peer", 0)
"""The only address that aioquic sees; the endpoint routes the datagrams."""
MAX_PIECES = 256
"""Ranges of a stream, shorter than `PIECE_BYTES`, that may wait for what precedes them."""
PIECE_BYTES = 1024
"""What follows a lost datagram is at least so long while a stream is busy."""
MAX_TOKEN_BYTES = 512
"""Of a Retry token; ours have about 90, those of other servers up to some 200."""
MAX_CRYPTO_BYTES = 16 * 1024
"""Of a handshake, that may wait for what precedes them, or for the rest of their message; RFC 9000
section 7.5 asks for 4096."""
KEY_PACKETS = 1 << 22
"""Sent before the keys are updated; RFC 9001 section 6.6 allows 2**23 with AES-GCM."""

SILENT: Final = logging.Logger("meshllm_quic.silent", logging.CRITICAL + 1)
"""For the library, which would otherwise log the errors of unauthenticated peers."""

_UNREADABLE: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
    InvalidVersion, UnsupportedAlgorithm,
)  # fmt: skip
"""Exceptions that the library raises for malformed input that it does not handle."""


class ConnectionMachine(QuicConnection):
    """One QUIC connection as a sans-IO machine; time is an argument."""

    def __init__(self, configuration: QuicConfiguration, **roles: Any) -> None:
        super().__init__(configuration=configuration, **roles)
        self._logger.logger = SILENT
        self._update_at = KEY_PACKETS
        is_server = not configuration.is_client
        for limit, streams in (
            (self._local_max_streams_bidi, len(STREAMS) if is_server else 0),
            (self._local_max_streams_uni, 0),
        ):
            limit.value = limit.sent = streams

    @property
    def is_client(self) -> bool:
        """Whether this side dialled."""
        return self._is_client

    @property
    def is_over(self) -> bool:
        """Whether either side has closed, or the idle timeout has passed."""
        return self._state in END_STATES

    @property
    def is_closing(self) -> bool:
        """Whether it is closed or about to send CONNECTION_CLOSE."""
        return self._close_event is not None

    @property
    def close_reason(self) -> tuple[int, str] | None:
        """Error code and reason phrase of the close; None while open."""
        event = self._close_event
        return (event.error_code, event.reason_phrase) if event is not None else None

    @property
    def peer_key(self) -> bytes | None:
        """The authenticated Ed25519 key of the peer; None before that, or for another key type."""
        return certified_key(self.tls._peer_certificate) if self._handshake_complete else None

    @property
    def heard(self) -> int:
        """Sum of the next packet numbers; forged or replayed datagrams do not change it."""
        return sum(space.largest_received_packet + 1 for space in self._spaces.values())

    @property
    def round_trip_s(self) -> float | None:
        """Smoothed; None before the first measurement."""
        return self._loss._rtt_smoothed if self._loss._rtt_initialized else None

    @property
    def bytes_per_s(self) -> float | None:
        """Delivery rate as estimated by the congestion controller; None if unknown."""
        rate: float | None = getattr(self._loss._cc, "bytes_per_s", None)
        return rate

    @property
    def size(self) -> int:
        """Longest datagram, in bytes."""
        return self._max_datagram_size

    @size.setter
    def size(self, size: int) -> None:
        self._max_datagram_size = self._loss._pacer._max_datagram_size = size
        self._loss._cc.max_datagram_size = size  # type: ignore[attr-defined]  # ours has it

    def extend_idle(self, until: float) -> None:
        """Do not let the idle timeout pass before ``until``."""
        if not self.is_closing and self._close_at is not None:
            self._close_at = max(self._close_at, until)

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        """Receive a datagram; raise `PeerFault` if it leaves the connection unusable."""
        try:
            super().receive_datagram(data, addr, now)
        except _UNREADABLE as error:
            raise PeerFault(f"Malformed datagram: {type(error).__name__}") from error

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        """Return the datagrams to send; raise `PeerFault` if the peer has made that impossible.

        aioquic lets a peer replace each stream that has ended; here there are as many as at first.
        """
        if self._packet_number >= self._update_at:
            self._update_at = self._packet_number + KEY_PACKETS
            self.request_key_update()
        try:
            datagrams = super().datagrams_to_send(now)
        except QuicPacketBuilderStop as error:  # no packet has room for what the peer made us send
            raise PeerFault("Frames to it do not fit into a packet") from error
        if not self._is_client:
            self._local_max_streams_bidi.value = len(STREAMS)
        return datagrams

    def reset_path(self, size: int) -> None:
        """Reset the path estimates: the route has changed; ``size`` is its datagram size."""
        reset_path(self, size)

    def is_open(self, channel: Channel) -> bool:
        """Return whether a stream can be written to; the client opens it by writing.

        None can once the connection closes, nor one that the peer has asked to stop.
        """
        if self.is_closing:
            return False
        if stream := self._streams.get(STREAMS[channel]):
            return stream.sender._reset_error_code is None
        return self._is_client and self._handshake_complete

    def unsent(self, channel: Channel) -> int:
        """Return the number of written bytes that were never sent."""
        stream = self._streams.get(STREAMS[channel])
        return stream.sender._buffer_stop - stream.sender.highest_offset if stream else 0

    def unacknowledged(self) -> int:
        """Return the number of written bytes that are not acknowledged."""
        return sum(len(stream.sender._buffer) for stream in self._streams.values())

    def write(self, channel: Channel, data: Buffer) -> None:
        """Append a copy of the bytes to a stream."""
        self.send_stream_data(STREAMS[channel], data)  # type: ignore[arg-type]  # it only appends

    def finish(self, channel: Channel) -> None:
        """Send FIN on a stream after the written data."""
        self.send_stream_data(STREAMS[channel], b"", end_stream=True)

    def grant(self, channel: Channel, offset: int) -> None:
        """Raise the flow-control limit of a stream to ``offset``; it never decreases."""
        stream = self._streams.get(STREAMS[channel])
        if stream is not None and offset > stream.max_stream_data_local:
            self._local_max_data.value += offset - stream.max_stream_data_local
            stream.max_stream_data_local = offset

    def acknowledge_with_data(self, now: float) -> None:
        """Send a pending acknowledgement with data that can be sent now, instead of alone later."""
        space = self._spaces.get(Epoch.ONE_RTT)
        if space is None or space.ack_at is None or space.ack_at <= now:
            return
        has_data = any(not stream.sender.buffer_is_empty for stream in self._streams.values())
        if has_data and self._loss._pacer.next_send_time(now=now) is None:
            space.ack_at = now

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = True

    def _handle_crypto_frame(self, context: QuicReceiveContext, frame_type: int, buf: Any) -> None:
        receiver = self._crypto_streams[context.epoch].receiver
        start = buf.tell()
        end = buf.pull_uint_var() + buf.pull_uint_var()
        buf.seek(start)
        if end - receiver.starting_offset() > MAX_CRYPTO_BYTES:
            raise QuicConnectionError(
                error_code=QuicErrorCode.CRYPTO_BUFFER_EXCEEDED,
                frame_type=frame_type,
                reason_phrase="Too far ahead in the handshake",
            )
        super()._handle_crypto_frame(context, frame_type, buf)
        _check_pieces(receiver, frame_type)
        if len(self.tls._receive_buffer) > MAX_CRYPTO_BYTES:  # of a message that is incomplete
            raise QuicConnectionError(
                error_code=QuicErrorCode.CRYPTO_BUFFER_EXCEEDED,
                frame_type=frame_type,
                reason_phrase="Too long a message of the handshake",
            )

    def _receive_retry_packet(
        self, header: QuicHeader, packet_without_tag: bytes, now: float
    ) -> None:
        """Ignore a token that would fill the Initial packets in which it is returned.

        Anyone on the path can make a Retry packet; its tag needs no secret.
        """
        if len(header.token) <= MAX_TOKEN_BYTES:
            super()._receive_retry_packet(header, packet_without_tag, now)

    def _handle_stream_frame(self, context: QuicReceiveContext, frame_type: int, buf: Any) -> None:
        super()._handle_stream_frame(context, frame_type, buf)
        for stream in self._streams.values():
            _check_pieces(stream.receiver, frame_type)

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        """Announce granted credit; the method of aioquic grants more by itself."""
        limit: Limit = self._local_max_data
        if limit.value != limit.sent:
            buffer = builder.start_frame(
                QuicFrameType.MAX_DATA,
                capacity=CONNECTION_LIMIT_FRAME_CAPACITY,
                handler=self._on_connection_limit_delivery,
                handler_args=(limit,),
            )
            buffer.push_uint_var(limit.value)
            limit.sent = limit.value

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        """Announce granted credit; the method of aioquic grants more by itself."""
        if stream.max_stream_data_local_sent != stream.max_stream_data_local:
            buffer = builder.start_frame(
                QuicFrameType.MAX_STREAM_DATA,
                capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
                handler=self._on_max_stream_data_delivery,
                handler_args=(stream,),
            )
            buffer.push_uint_var(stream.stream_id or 0)
            buffer.push_uint_var(stream.max_stream_data_local)
            stream.max_stream_data_local_sent = stream.max_stream_data_local


def _check_pieces(receiver: QuicStreamReceiver, frame_type: int) -> None:
    """Refuse a stream in more than `MAX_PIECES` short pieces; RFC 9000 section 21.6."""
    pieces = receiver._ranges
    if len(pieces) > MAX_PIECES < sum(len(each) < PIECE_BYTES for each in pieces):
        raise QuicConnectionError(
            error_code=QuicErrorCode.PROTOCOL_VIOLATION,
            frame_type=frame_type,
            reason_phrase="Too many pieces of a stream",
        )
