"""Limits of the QUIC machine on what its peer sends."""

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.quic.connection import QuicConnectionError, QuicReceiveContext
from aioquic.quic.packet import QuicFrameType, encode_quic_retry
from aioquic.tls import Epoch

from meshllm.errors import PeerFault
from meshllm.transport.contract import Channel
from meshllm_quic.base.identity import Identity
from meshllm_quic.link.machine import (
    MAX_CRYPTO_BYTES,
    MAX_PIECES,
    MAX_TOKEN_BYTES,
    PEER,
    PIECE_BYTES,
    ConnectionMachine,
)

CRYPTO = QuicFrameType.CRYPTO
STREAM = QuicFrameType.STREAM_BASE | 6  # with offset and length


def pair() -> tuple[ConnectionMachine, ConnectionMachine]:
    """Return a client and a server that have exchanged the first datagram."""
    client = ConnectionMachine(Identity(b"a" * 32).configure(is_client=True))
    server = ConnectionMachine(
        Identity(b"b" * 32).configure(is_client=False),
        original_destination_connection_id=client.original_destination_connection_id,
    )
    client.connect(PEER, now=0.0)
    pass_on(client, server, 0.0)
    return client, server


def pass_on(sender: ConnectionMachine, receiver: ConnectionMachine, now: float) -> int:
    """Deliver what the sender has to send; return the number of datagrams."""
    datagrams = sender.datagrams_to_send(now)
    for datagram, _ in datagrams:
        receiver.receive_datagram(datagram, PEER, now)
    return len(datagrams)


def connected() -> tuple[ConnectionMachine, ConnectionMachine]:
    client, server = pair()
    now = 0.0
    while pass_on(server, client, now) + pass_on(client, server, now):
        now += 0.05
    return client, server


def take(machine: ConnectionMachine, epoch: Epoch, frame: bytes) -> None:
    path = machine._network_paths[0]
    machine._payload_received(
        QuicReceiveContext(
            epoch=epoch,
            host_cid=machine.host_cid,
            network_path=path,
            quic_logger_frames=None,
            time=1.0,
            version=machine._version,
        ),
        frame,
    )


def piece(kind: int, stream: bytes, offset: int, data: bytes) -> bytes:
    head = encode_uint_var(kind) + stream + encode_uint_var(offset)
    return head + encode_uint_var(len(data)) + data


def test_a_handshake_in_single_bytes_is_refused() -> None:
    _, server = pair()
    first = server._crypto_streams[Epoch.INITIAL].receiver.starting_offset() + 1

    for number in range(MAX_PIECES):
        take(server, Epoch.INITIAL, piece(CRYPTO, b"", first + 2 * number, b"x"))
    with pytest.raises(QuicConnectionError, match="Too many pieces"):
        take(server, Epoch.INITIAL, piece(CRYPTO, b"", first + 2 * MAX_PIECES, b"x"))


def test_a_handshake_far_ahead_is_refused_before_memory_is_allocated() -> None:
    _, server = pair()
    receiver = server._crypto_streams[Epoch.INITIAL].receiver
    most = receiver.starting_offset() + MAX_CRYPTO_BYTES

    with pytest.raises(QuicConnectionError, match="Too far ahead"):
        take(server, Epoch.INITIAL, piece(CRYPTO, b"", most, b"x"))
    assert not receiver._buffer
    take(server, Epoch.INITIAL, piece(CRYPTO, b"", most - 1, b"x"))


def test_a_message_of_the_handshake_without_end_is_refused() -> None:
    _, server = pair()
    receiver = server._crypto_streams[Epoch.HANDSHAKE].receiver
    take(server, Epoch.HANDSHAKE, piece(CRYPTO, b"", 0, b"\x0b\xff\xff\xff"))  # of 16 MiB

    def send() -> None:
        place = receiver.starting_offset()
        take(server, Epoch.HANDSHAKE, piece(CRYPTO, b"", place, bytes(1024)))

    for _ in range(MAX_CRYPTO_BYTES // 1024 - 1):
        send()
    with pytest.raises(QuicConnectionError, match="Too long a message"):
        send()


def retry(client: ConnectionMachine, token: bytes) -> bytes:
    version = client._version
    assert version is not None
    return encode_quic_retry(
        version=version,
        source_cid=b"s" * 8,
        destination_cid=client.host_cid,
        original_destination_cid=client.original_destination_connection_id,
        retry_token=token,
    )


@pytest.mark.parametrize(("length", "is_taken"), [(MAX_TOKEN_BYTES, True), (1171, False)])
def test_a_token_that_leaves_no_room_is_ignored(length: int, *, is_taken: bool) -> None:
    client = ConnectionMachine(Identity(b"a" * 32).configure(is_client=True))
    client.connect(PEER, now=0.0)
    client.datagrams_to_send(0.0)

    client.receive_datagram(retry(client, b"t" * length), PEER, 0.01)
    client.close()

    assert bool(client._retry_count) is is_taken
    assert client.datagrams_to_send(0.02)


def test_a_packet_that_cannot_be_built_is_the_fault_of_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshllm_quic.link.machine.MAX_TOKEN_BYTES", 2000)
    client = ConnectionMachine(Identity(b"a" * 32).configure(is_client=True))
    client.connect(PEER, now=0.0)
    client.datagrams_to_send(0.0)
    client.receive_datagram(retry(client, b"t" * 1171), PEER, 0.01)
    client.close()

    with pytest.raises(PeerFault, match="do not fit into a packet"):
        client.datagrams_to_send(0.02)


def test_a_stream_in_single_bytes_is_refused() -> None:
    _, server = connected()

    for number in range(MAX_PIECES):
        take(server, Epoch.ONE_RTT, piece(STREAM, b"\4", 1 + 2 * number, b"x"))
    with pytest.raises(QuicConnectionError, match="Too many pieces"):
        take(server, Epoch.ONE_RTT, piece(STREAM, b"\4", 1 + 2 * MAX_PIECES, b"x"))


def test_a_hole_in_a_stream_permits_no_more_single_bytes() -> None:
    _, server = connected()
    far = (MAX_PIECES + 2) * PIECE_BYTES
    take(server, Epoch.ONE_RTT, piece(STREAM, b"\4", 1, b"x"))
    server.grant(Channel.DATA, far + 1)

    take(server, Epoch.ONE_RTT, piece(STREAM, b"\4", far, b"x"))
    for number in range(1, MAX_PIECES - 1):
        take(server, Epoch.ONE_RTT, piece(STREAM, b"\4", 1 + 2 * number, b"x"))
    with pytest.raises(QuicConnectionError, match="Too many pieces"):
        take(server, Epoch.ONE_RTT, piece(STREAM, b"\4", 2 * MAX_PIECES, b"x"))


def test_a_stream_that_lost_every_second_datagram_goes_on() -> None:
    client, server = connected()
    lost = 2 * MAX_PIECES
    client.write(Channel.DATA, b"x")
    pass_on(client, server, 10.0)
    server.grant(Channel.DATA, (2 * lost + 1) * PIECE_BYTES)

    for number in range(lost):
        offset = (2 * number + 2) * PIECE_BYTES
        take(server, Epoch.ONE_RTT, piece(STREAM, b"\4", offset - 1, bytes(PIECE_BYTES)))

    assert not server.is_closing


@pytest.mark.parametrize("loses", [False, True])
def test_both_ends_update_their_keys_and_what_is_in_flight_arrives(
    loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm_quic.link.machine.KEY_PACKETS", 32)
    client, server = connected()
    phases, size, now, arrived = set[tuple[int, int]](), 200 * 1024, 10.0, 0
    client.write(Channel.DATA, bytes(size))

    while arrived < size and now < 100.0:
        now += 0.05
        crossing = server.datagrams_to_send(now)  # with the keys of before
        sent = client.datagrams_to_send(now)
        lost = sent[:1] if loses and int(now / 0.05) % 3 == 0 else []
        for datagram, _ in sent[len(lost) :]:
            server.receive_datagram(datagram, PEER, now)
        for datagram, _ in crossing:
            client.receive_datagram(datagram, PEER, now)
        for machine in (client, server):
            if (at := machine.get_timer()) is not None and at <= now:
                machine.handle_timer(now)
        arrived = server._streams[4].receiver.starting_offset()
        server.grant(Channel.DATA, arrived + size)
        one, other = (each._cryptos[Epoch.ONE_RTT] for each in (client, server))
        phases.add((one.key_phase, other.key_phase))

    assert arrived == size
    assert phases >= {(0, 0), (1, 1)}
    assert not client.is_closing
    assert not server.is_closing


def test_every_new_datagram_is_heard_and_no_replayed_one() -> None:
    client, server = connected()
    heard = [server.heard]

    for number in range(4):
        client.send_ping(number)
        ((datagram, _),) = client.datagrams_to_send(20.0 + number)
        for _ in range(2):
            server.receive_datagram(datagram, PEER, 20.0 + number)
            heard.append(server.heard)

    assert all(after > before for before, after in zip(heard[::2], heard[1::2], strict=False))
    assert heard[1::2] == heard[2::2]
