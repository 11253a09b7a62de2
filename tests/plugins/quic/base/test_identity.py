"""The TLS identity of a node, and the private parts of aioquic in use."""

import inspect
from datetime import UTC, datetime

from aioquic import tls
from aioquic.quic import connection as quic
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketRecovery
from aioquic.quic.stream import QuicStream

from meshllm.transport.contract import Channel
from meshllm_quic.base.identity import Identity, certified_key
from meshllm_quic.link.machine import PEER, STREAMS, ConnectionMachine
from tests.plugins.quic.stranger import rsa_body


def test_a_certificate_depends_only_on_the_key() -> None:
    one, again, other = Identity(bytes(32)), Identity(bytes(32)), Identity(b"o" * 32)

    assert one.certificate == again.certificate
    assert certified_key(one.certificate) == one.key != other.key


def test_a_certificate_tolerates_wrong_clocks() -> None:
    certificate = Identity(bytes(32)).certificate

    assert certificate.not_valid_before_utc < datetime(2001, 1, 1, tzinfo=UTC)
    assert certificate.not_valid_after_utc > datetime(2100, 1, 1, tzinfo=UTC)


def test_other_key_types_are_none() -> None:
    assert certified_key(None) is None
    assert certified_key(rsa_body().certificate) is None


def shake(client: ConnectionMachine, server: ConnectionMachine) -> None:
    """Exchange datagrams until both sides are silent."""
    client.connect(PEER, now=0.0)
    for turn in range(8):
        for sender, receiver in ((client, server), (server, client)):
            for datagram, _ in sender.datagrams_to_send(now=turn * 0.1):
                receiver.receive_datagram(datagram, PEER, now=turn * 0.1)


def pair() -> tuple[ConnectionMachine, ConnectionMachine]:
    one, other = Identity(b"c" * 32), Identity(b"s" * 32)
    client = ConnectionMachine(one.configure(is_client=True))
    server = ConnectionMachine(
        other.configure(is_client=False),
        original_destination_connection_id=client.original_destination_connection_id,
    )
    return client, server


def test_both_sides_authenticate_each_other() -> None:
    client, server = pair()
    before = client.peer_key, server.peer_key

    shake(client, server)

    assert before == (None, None)
    assert client.peer_key == Identity(b"s" * 32).key
    assert server.peer_key == Identity(b"c" * 32).key


def test_there_is_no_resumption_and_no_early_data() -> None:
    client, server = pair()

    shake(client, server)

    assert server.tls.new_session_ticket_cb is None
    assert server.tls.get_session_ticket_cb is None
    assert not client.tls.session_resumed
    assert not server.tls.early_data_accepted


def test_only_the_client_opens_streams_and_only_two() -> None:
    client, server = pair()

    shake(client, server)

    assert client._remote_max_streams_bidi == len(STREAMS)
    assert client._remote_max_streams_uni == 0
    assert server._remote_max_streams_bidi == 0
    assert server._remote_max_streams_uni == 0


def test_windows_grow_only_by_grants() -> None:
    client, server = pair()
    shake(client, server)
    client.write(Channel.DATA, bytes(10 * 64 * 1024))

    for turn in range(100):
        for sender, receiver in ((client, server), (server, client)):
            for datagram, _ in sender.datagrams_to_send(now=1 + turn * 0.1):
                receiver.receive_datagram(datagram, PEER, now=1 + turn * 0.1)
    stuck = server._streams[STREAMS[Channel.DATA]].receiver.highest_offset
    server.grant(Channel.DATA, 3 * 64 * 1024)
    for turn in range(100):
        for sender, receiver in ((server, client), (client, server)):
            for datagram, _ in sender.datagrams_to_send(now=20 + turn * 0.1):
                receiver.receive_datagram(datagram, PEER, now=20 + turn * 0.1)

    assert stuck == 64 * 1024
    assert server._streams[STREAMS[Channel.DATA]].receiver.highest_offset == 3 * 64 * 1024


def test_aioquic_still_has_the_private_attributes_in_use() -> None:
    client, server = pair()
    shake(client, server)
    client.write(Channel.CONTROL, b"x")
    stream = client._streams[0]

    assert {"_request_client_certificate", "_peer_certificate"} <= vars(server.tls).keys()
    assert {
        "_close_event", "_handshake_complete", "_is_client", "_local_max_data",
        "_local_max_streams_bidi", "_local_max_streams_uni", "_logger", "_loss",
        "_max_datagram_size", "_spaces", "_state", "_streams",
    } <= vars(client).keys()  # fmt: skip
    assert {"_rtt_initialized", "_rtt_smoothed", "_cc", "_pacer"} <= vars(client._loss).keys()
    assert {"_buffer", "_buffer_stop", "highest_offset"} <= vars(stream.sender).keys()
    assert {"max_stream_data_local", "max_stream_data_local_sent"} <= vars(stream).keys()
    assert "ack_at" in vars(client._spaces[tls.Epoch.ONE_RTT])


def test_aioquic_still_calls_the_overridden_methods() -> None:
    source = inspect.getsource(quic.QuicConnection)

    assert "self._write_connection_limits(builder=builder, space=space)" in source
    assert "self._write_stream_limits(builder=builder, space=space, stream=stream)" in source
    assert "self._initialize(" in source
    assert [*inspect.signature(quic.QuicConnection._write_stream_limits).parameters] == [
        "self", "builder", "space", "stream",
    ]  # fmt: skip
    assert "start_frame" in vars(QuicPacketBuilder)
    assert "on_ack_received" in vars(QuicPacketRecovery)
    assert QuicStream().max_stream_data_local == 0
