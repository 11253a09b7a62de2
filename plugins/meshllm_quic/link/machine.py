"""aioquic's connection with what meshllm adds to it.

Everything of this package that touches a private part of aioquic is here (and in `congestion`); the
version is pinned, and a test guards each of them. What is added:

- The server asks for a certificate, and `peer_key` tells whose it was.
- Flow control is back-pressure: the stock connection doubles its windows whether or not anybody
  reads; here the reader grants every byte, by `grant`.
- Nobody opens a stream but the client, two of them: one for each channel.
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
)
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509 import InvalidVersion

from meshllm.errors import PeerFault
from meshllm.transport.contract import Buffer, Channel
from meshllm_quic.base.congestion import reset_path
from meshllm_quic.base.identity import certified_key

STREAMS: Final = {Channel.CONTROL: 0, Channel.DATA: 4}
"""Both are opened by the client, RFC 9000 section 2.1."""
PEER: Final = ("peer", 0)
"""The one address that QUIC sees; where its datagrams go is settled below it."""

SILENT: Final = logging.Logger("meshllm_quic.silent", logging.CRITICAL + 1)
"""For the library, which would write what a stranger does wrong into its log."""

_UNREADABLE: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
    InvalidVersion, UnsupportedAlgorithm,
)  # fmt: skip
"""What the library raises where it has not thought of what a stranger may write."""


class Machine(QuicConnection):
    """One connection; time is an argument, datagrams come in and go out by calls."""

    def __init__(self, configuration: QuicConfiguration, **roles: Any) -> None:
        super().__init__(configuration=configuration, **roles)
        self._logger.logger = SILENT
        is_server = not configuration.is_client
        for limit, streams in (
            (self._local_max_streams_bidi, len(STREAMS) if is_server else 0),
            (self._local_max_streams_uni, 0),
        ):
            limit.value = limit.sent = streams

    @property
    def is_client(self) -> bool:
        """Whether this side began it."""
        return self._is_client

    @property
    def is_over(self) -> bool:
        """Whether either side has closed, or nothing was heard for too long."""
        return self._state in END_STATES

    @property
    def is_closing(self) -> bool:
        """Whether it is over as soon as what is to be sent has left."""
        return self._close_event is not None

    @property
    def close_reason(self) -> tuple[int, str] | None:
        """The code and the words it was closed with."""
        event = self._close_event
        return (event.error_code, event.reason_phrase) if event is not None else None

    @property
    def peer_key(self) -> bytes | None:
        """The proven Ed25519 key of the other side; None before that, or where it is another."""
        return certified_key(self.tls._peer_certificate) if self._handshake_complete else None

    @property
    def heard(self) -> int:
        """How far the other side has come, which a forged or repeated datagram does not change."""
        return sum(space.expected_packet_number for space in self._spaces.values())

    @property
    def round_trip_s(self) -> float | None:
        """Smoothed; None before the first measurement."""
        return self._loss._rtt_smoothed if self._loss._rtt_initialized else None

    @property
    def bytes_per_s(self) -> float | None:
        """How fast the controller sees bytes arrive at the other side, where it knows."""
        rate: float | None = getattr(self._loss._cc, "bytes_per_s", None)
        return rate

    @property
    def size(self) -> int:
        """Bytes of the longest datagram."""
        return self._max_datagram_size

    @size.setter
    def size(self, size: int) -> None:
        self._max_datagram_size = self._loss._pacer._max_datagram_size = size
        self._loss._cc.max_datagram_size = size  # type: ignore[attr-defined]  # ours has it

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        """Take a datagram; raise `PeerFault` for one after which nothing more can be read."""
        try:
            super().receive_datagram(data, addr, now)
        except _UNREADABLE as error:
            raise PeerFault(f"A datagram ended in {type(error).__name__}") from error

    def moved(self, size: int) -> None:
        """Forget what was measured: the datagrams take another way, of that size."""
        reset_path(self, size)

    def is_open(self, channel: Channel) -> bool:
        """Tell whether a stream can be written to: the client opens it by writing."""
        return STREAMS[channel] in self._streams or (self._is_client and self._handshake_complete)

    def unsent(self, channel: Channel) -> int:
        """Count the bytes that were written and have never left."""
        stream = self._streams.get(STREAMS[channel])
        return stream.sender._buffer_stop - stream.sender.highest_offset if stream else 0

    def unacknowledged(self) -> int:
        """Count the bytes that were written and may not have arrived."""
        return sum(len(stream.sender._buffer) for stream in self._streams.values())

    def write(self, channel: Channel, data: Buffer) -> None:
        """Copy bytes to the end of a stream."""
        self.send_stream_data(STREAMS[channel], data)  # type: ignore[arg-type]  # it only appends

    def finish(self, channel: Channel) -> None:
        """End a stream after what was written."""
        self.send_stream_data(STREAMS[channel], b"", end_stream=True)

    def grant(self, channel: Channel, offset: int) -> None:
        """Let the other side send a stream up to ``offset``; never takes back."""
        stream = self._streams.get(STREAMS[channel])
        if stream is not None and offset > stream.max_stream_data_local:
            self._local_max_data.value += offset - stream.max_stream_data_local
            stream.max_stream_data_local = offset

    def acknowledge_with_data(self, now: float) -> None:
        """Let a due acknowledgement travel with data that leaves now, not later on its own."""
        space = self._spaces.get(Epoch.ONE_RTT)
        if space is None or space.ack_at is None or space.ack_at <= now:
            return
        has_data = any(not stream.sender.buffer_is_empty for stream in self._streams.values())
        if has_data and self._loss._pacer.next_send_time(now=now) is None:
            space.ack_at = now

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = True

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        """Announce what was granted; the stock method grants by itself."""
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
        """Announce what was granted; the stock method grants by itself."""
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
