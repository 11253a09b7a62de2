"""Authentication, closing and failures of links."""

import asyncio
from collections.abc import Callable

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import StreamDataReceived
from aioquic.quic.packet import encode_quic_retry

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.testing.clock import VirtualLoop
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Channel, Link, SupportsUnreadLimit
from meshllm.transport.linger import MAX_S, STALL_S
from meshllm_quic.base.identity import IDLE_S, UNAUTHENTICATED_WINDOW, Identity
from meshllm_quic.link.connection import (
    BROKEN,
    GRACE_S,
    OPEN_S,
    REFUSED,
    REFUSED_ROUNDS,
    REFUSED_S,
    Connection,
)
from meshllm_quic.link.listener import QuicListener
from meshllm_quic.transport import QuicTransport
from meshllm_quic.wire.lanes import HEAD, HELLO, MESSAGE, OFFER, WINDOW_BYTES
from meshllm_quic.wire.routes import Direct
from tests.plugins.quic.stranger import Stranger, nobody, rsa_body, somebody
from tests.plugins.quic.street import PORT, Street, street
from tests.plugins.quic.world import echo
from tests.simulation.ears import virtual
from tests.simulation.wires import Line


async def nobody_came(listener: QuicListener) -> bool:
    try:
        async with asyncio.timeout(1.0):
            await anext(aiter(listener.links()))
    except TimeoutError:
        return True
    return False


async def greeted(here: Street, more: bytes = b"") -> tuple[Stranger, Link]:
    """Let a stranger greet on both streams, and say more; return it, and the accepted link."""
    stranger = await here.knock(somebody())
    for stream in (0, 4):
        stranger.quic.send_stream_data(stream, HEAD.pack(HELLO, 0) + more)
    await stranger.live(0.1)
    return stranger, await anext(aiter(here.listener.links()))


@pytest.mark.parametrize("who", [nobody, rsa_body])
@virtual
async def test_a_client_without_ed25519_certificate_gets_no_link(
    who: Callable[[], QuicConfiguration],
) -> None:
    async with street() as here:
        stranger = await here.knock(who())
        stranger.quic.send_stream_data(0, HEAD.pack(HELLO, 0) + HEAD.pack(MESSAGE, 1) + b"!")
        stranger.quic.send_stream_data(4, HEAD.pack(HELLO, 0))
        await stranger.live(0.5)

        assert stranger.end is not None
        assert stranger.end.error_code == REFUSED
        assert await nobody_came(here.listener)


@virtual
async def test_another_protocol_gets_no_link() -> None:
    configuration = somebody()
    configuration.alpn_protocols = ["h3"]
    async with street() as here:
        stranger = await here.knock(configuration)
        await stranger.live(2.0)

        assert stranger.end is not None
        assert await nobody_came(here.listener)


@virtual
async def test_a_peer_that_leaves_no_room_in_packets_fails_the_dial_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshllm_quic.link.machine.MAX_TOKEN_BYTES", 2000)
    loop, failed = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, what: failed.append(what))
    async with street() as here:
        endpoint = await QuicTransport(here.near)._bind(None, 0)
        silent = Direct((here.far.hosts()[0], 9))
        dialled = endpoint.connect([silent], "there", Identity(bytes(32)).key)
        machine = dialled.machine
        assert machine._version is not None
        retry = encode_quic_retry(
            version=machine._version,
            source_cid=b"s" * 8,
            destination_cid=machine.host_cid,
            original_destination_cid=machine.original_destination_connection_id,
            retry_token=b"t" * 1171,
        )
        await asyncio.sleep(0.1)
        dialled.receive(retry, silent, loop.time())
        dialled.work()

        with pytest.raises(MeshError):
            await dialled.wait_open()
        await asyncio.sleep(2 * OPEN_S)
        assert failed == []


@virtual
async def test_a_dial_refuses_an_unexpected_key() -> None:
    async with street() as here:
        host, port = here.listener.address.removeprefix("quic://").split(":")
        endpoint = await QuicTransport(here.near)._bind(None, 0)
        wrong = endpoint.connect([Direct((host, int(port)))], "there", Identity(bytes(32)).key)

        with pytest.raises(PeerFault, match="a different key than its address names"):
            await wrong.wait_open()
        assert await nobody_came(here.listener)


@virtual
async def test_links_have_the_keys_of_their_peers() -> None:
    async with street() as here:
        one, other = await here.meet()

        assert one.peer_key == Identity(b"f" * 32).key
        assert len(other.peer_key) == 32
        assert other.peer_key != one.peer_key
        await asyncio.gather(one.close(), other.close())


@virtual
async def test_an_idle_link_stays_open() -> None:
    async with street() as here:
        one, other = await here.meet()

        await asyncio.sleep(20 * IDLE_S)

        await echo(one, other)
        await asyncio.gather(one.close(), other.close())


def suspend(seconds: float) -> None:
    """Suspend this process, both ends of its links included."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.suspend(seconds)


@virtual
async def test_a_link_whose_ends_were_both_stopped_goes_on() -> None:
    async with street() as here:
        one, other = await here.meet()

        for _ in range(2):
            suspend(2 * IDLE_S)
            await asyncio.sleep(2 * GRACE_S)

        await echo(one, other)
        await asyncio.gather(one.close(), other.close())


@virtual
async def test_after_a_stop_a_dead_machine_is_a_lost_link() -> None:
    async with street() as here:
        one, _other = await here.meet()

        here.far.stop()
        suspend(2 * IDLE_S)

        with pytest.raises(LinkLost):
            async with asyncio.timeout(2 * IDLE_S):
                await one.receive()


@pytest.mark.parametrize("is_there", [True, False])
@virtual
async def test_after_a_stop_a_refusal_is_checked_again(*, is_there: bool) -> None:
    async with street() as here:
        one, other = await here.meet()
        connection = one._wire
        assert isinstance(connection, Connection)
        await asyncio.sleep(1.0)  # nothing is under way
        if not is_there:
            here.far.stop()
        connection.refused(asyncio.get_running_loop().time())
        connection._rounds = REFUSED_ROUNDS
        suspend(1.0)

        if is_there:
            await echo(one, other)
            await asyncio.gather(one.close(), other.close())
        else:
            with pytest.raises(LinkLost, match="no longer listens"):
                async with asyncio.timeout(1.0):
                    await one.receive()


@virtual
async def test_forged_refusals_end_no_link_whose_peer_answers() -> None:
    async with street() as here:
        one, other = await here.meet()
        connection = one._wire
        assert isinstance(connection, Connection)
        for _ in range(10 * REFUSED_ROUNDS):
            connection.refused(asyncio.get_running_loop().time())
            await asyncio.sleep(REFUSED_S / 2)

        await echo(one, other)
        await asyncio.gather(one.close(), other.close())


@virtual
async def test_a_refusal_and_silence_for_some_round_trips_end_a_link() -> None:
    async with street() as here:
        one, _other = await here.meet()
        connection = one._wire
        assert isinstance(connection, Connection)
        await asyncio.sleep(1.0)  # nothing is under way
        here.far.stop()
        now = asyncio.get_running_loop().time

        refused_at = now()
        connection.refused(refused_at)
        with pytest.raises(LinkLost, match="no longer listens"):
            await one.receive()

        round_trip_s = connection.machine.round_trip_s
        assert round_trip_s
        most_s = REFUSED_ROUNDS * max(REFUSED_S, 2 * round_trip_s)
        assert now() - refused_at == pytest.approx(most_s, abs=0.01)


@virtual
async def test_a_dead_machine_is_a_lost_link() -> None:
    async with street() as here:
        one, _other = await here.meet()

        here.far.stop()

        with pytest.raises(LinkLost):
            async with asyncio.timeout(2 * IDLE_S):
                await one.receive()


@virtual
async def test_the_close_datagram_is_repeated() -> None:
    async with street() as here:
        one, other = await here.meet()
        await asyncio.sleep(1.0)
        here.internet.line_between(here.near, here.far, Line(loss=1.0))
        closing = asyncio.create_task(other.close())
        await asyncio.sleep(20)  # the idle timeout has passed
        await closing
        here.internet.line_between(here.near, here.far, Line())

        with pytest.raises(LinkLost):
            async with asyncio.timeout(IDLE_S / 2):
                await one.receive()


@virtual
async def test_close_waits_for_data_in_flight() -> None:
    async with street() as here:
        one, other = await here.meet()
        here.internet.line_between(here.near, here.far, Line(bytes_per_s=100_000))

        await one.send([bytes(200_000)])
        await one.close()

        assert len((await other.receive())[1]) == 200_000
        with pytest.raises(LinkLost):
            await other.receive()


@virtual
async def test_a_peer_that_reads_slowly_delays_the_end_only_for_a_while() -> None:
    async with street() as here:
        one, other = await here.meet()
        endpoint = here.transport._endpoint
        assert endpoint is not None
        here.internet.line_between(here.near, here.far, Line(bytes_per_s=10_000))

        await other.send([bytes(1_000_000)])
        await other.close()
        await asyncio.sleep(MAX_S - 2.0)
        assert len(endpoint.table) == 1
        await asyncio.sleep(STALL_S + 2.0)

        assert len(endpoint.table) == 0
        await one.close()


@pytest.mark.parametrize("after_s", [0.0, 1.0])
@virtual
async def test_a_peer_whose_link_is_closed_gets_no_relay(after_s: float) -> None:
    async with street() as here:
        one, other = await here.meet()
        endpoint = here.transport._endpoint
        assert endpoint is not None
        await asyncio.sleep(after_s)
        here.internet.line_between(here.near, here.far, Line(bytes_per_s=10_000))

        await other.send([bytes(1_000_000)])
        await other.close()
        other.limit_unread(None)
        await asyncio.sleep(1.0)

        assert len(endpoint.table) == 1
        assert endpoint._members.total() == 0
        await one.close()


@virtual
async def test_an_unauthenticated_peer_fills_at_most_its_window() -> None:
    async with street() as here:
        stranger = await here.knock(somebody())
        stranger.quic.send_stream_data(0, HEAD.pack(HELLO, 0))
        stranger.quic.send_stream_data(4, HEAD.pack(HELLO, 0) + bytes(10 * UNAUTHENTICATED_WINDOW))
        await stranger.live(5.0)

        sent = stranger.quic._streams[4].sender.highest_offset
        assert sent == UNAUTHENTICATED_WINDOW


@pytest.mark.parametrize("announced", [0, MAX_MESSAGE_BYTES])
@virtual
async def test_an_accepted_peer_gets_no_credit_before_it_is_authenticated(announced: int) -> None:
    async with street() as here:
        stranger, link = await greeted(here, HEAD.pack(MESSAGE, announced))
        assert isinstance(link, SupportsUnreadLimit)
        await asyncio.sleep(0)
        link.limit_unread(UNAUTHENTICATED_WINDOW)
        await stranger.live(1.0)

        granted = stranger.quic._streams[4].max_stream_data_remote
        assert granted <= UNAUTHENTICATED_WINDOW + 2 * HEAD.size
        await link.close()


@virtual
async def test_a_peer_without_a_limit_soon_gets_the_whole_window() -> None:
    async with street() as here:
        stranger, _link = await greeted(here)
        await stranger.live(1.0)

        assert stranger.quic._streams[4].max_stream_data_remote >= WINDOW_BYTES


@virtual
async def test_an_oversized_message_ends_the_link() -> None:
    async with street() as here:
        stranger, link = await greeted(here)
        stranger.quic.send_stream_data(4, HEAD.pack(MESSAGE, 0xFFFFFFFF))
        await stranger.live(0.5)

        with pytest.raises(PeerFault, match="Invalid record: kind 0, 4294967295 B"):
            await link.receive()
        assert stranger.end is not None
        assert stranger.end.error_code == BROKEN


@pytest.mark.parametrize("body", [b"", bytes(31), bytes(33), bytes(32 + 17 * 18)])
@virtual
async def test_an_invalid_offer_ends_the_link(body: bytes) -> None:
    async with street() as here:
        stranger, link = await greeted(here)
        stranger.quic.send_stream_data(0, HEAD.pack(OFFER, len(body)) + body)
        await stranger.live(0.5)

        with pytest.raises(PeerFault, match="Protocol violation"):
            await link.receive()


@virtual
async def test_a_reset_stream_ends_the_link() -> None:
    async with street() as here:
        stranger, link = await greeted(here)
        stranger.quic.reset_stream(4, 0)
        await stranger.live(0.5)

        with pytest.raises(PeerFault, match="reset a stream"):
            await link.receive()


@virtual
async def test_a_peer_authenticated_after_the_end_gets_no_relay() -> None:
    async with street() as here:
        one, other = await here.meet()
        endpoint = here.transport._endpoint
        assert endpoint is not None
        other.limit_unread(UNAUTHENTICATED_WINDOW)
        await asyncio.gather(one.close(), other.close())

        other.limit_unread(None)
        await asyncio.sleep(1.0)

        assert len(endpoint.table) == 0
        assert endpoint._members.total() == 0


@virtual
async def test_a_stream_that_the_peer_stops_can_still_be_closed() -> None:
    async with street() as here:
        stranger, link = await greeted(here)
        await link.send([b"hello"], Channel.CONTROL)
        for stream in (0, 4):
            stranger.quic.stop_stream(stream, 0)
        await stranger.live(0.5)

        await link.close()
        with pytest.raises(LinkLost):
            await link.send([b"more"], Channel.CONTROL)


@virtual
async def test_a_third_stream_is_refused_after_one_has_ended() -> None:
    async with street() as here:
        stranger, link = await greeted(here)
        closing = asyncio.create_task(link.close())
        await stranger.live(0.1)
        stranger.quic.send_stream_data(0, b"", end_stream=True)
        await stranger.live(0.1)

        stranger.quic._remote_max_streams_bidi = 3
        stranger.quic.send_stream_data(8, b"more")
        await stranger.live(0.5)

        assert stranger.end is not None
        assert stranger.end.reason_phrase == "Too many streams open"
        await closing


@virtual
async def test_data_of_an_unknown_stream_ends_the_link() -> None:
    async with street() as here:
        one, _other = await here.meet()
        connection = one._wire
        assert isinstance(connection, Connection)

        event = StreamDataReceived(data=b"more", end_stream=False, stream_id=8)
        connection.machine._events.append(event)
        connection.work()

        with pytest.raises(PeerFault, match="opened stream 8"):
            await one.receive()


@virtual
async def test_gaps_in_a_stream_buffer_at_most_the_window() -> None:
    async with street() as here:
        stranger = await here.knock(somebody())
        stranger.quic.send_stream_data(0, HEAD.pack(HELLO, 0))
        stranger.quic.send_stream_data(4, HEAD.pack(HELLO, 0) + bytes(1000))
        sender = stranger.quic._streams[4].sender
        sender._pending.subtract(10, 1000)  # a hole
        await stranger.live(0.2)
        sender._buffer += bytes(100 * UNAUTHENTICATED_WINDOW)
        sender._buffer_stop += 100 * UNAUTHENTICATED_WINDOW
        stranger.quic._streams[4].max_stream_data_remote = 1 << 40
        stranger.quic._remote_max_data = 1 << 40
        sender._pending.add(90 * UNAUTHENTICATED_WINDOW, 90 * UNAUTHENTICATED_WINDOW + 10)
        sender.buffer_is_empty = False
        await stranger.live(0.5)

        assert stranger.end is not None
        assert stranger.end.reason_phrase == "Over stream data limit"


@virtual
async def test_a_handshake_times_out() -> None:
    async with street() as here:
        stranger = Stranger((here.far.hosts()[0], PORT), somebody())
        stranger.socket = await here.near.open(None, 0, lambda _: None)
        stranger.quic.connect(stranger.to, now=asyncio.get_running_loop().time())
        stranger.transmit()
        await asyncio.sleep(0.1)
        endpoint = here.transport._endpoint
        assert endpoint is not None
        during = len(endpoint.table)

        await asyncio.sleep(OPEN_S + 0.1)

        assert (during, len(endpoint.table)) == (1, 0)


@virtual
async def test_a_dial_without_an_answer_says_so() -> None:
    async with street() as here:
        endpoint = await QuicTransport(here.near)._bind(None, 0)
        nobody_there = endpoint.connect([Direct((here.far.hosts()[0], 1))], "there", None)
        began = asyncio.get_running_loop().time()

        with pytest.raises(LinkLost, match=r"^No answer from `there` within 5 s$"):
            await nobody_there.wait_open()

        assert asyncio.get_running_loop().time() - began == pytest.approx(OPEN_S, abs=0.1)
        assert len(endpoint.table) == 0


@virtual
async def test_control_overtakes_waiting_data() -> None:
    async with street() as here:
        one, other = await here.meet()
        here.internet.line_between(here.near, here.far, Line(bytes_per_s=200_000, delay_s=0.01))
        for _ in range(16):
            await one.send([bytes(64 * 1024)])
        await one.send([b"now"], Channel.CONTROL)

        before = 0
        while (await other.receive())[0] is Channel.DATA:
            before += 1

        assert before <= 8
        await asyncio.gather(one.close(), other.close())
