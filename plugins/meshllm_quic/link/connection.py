"""Driver of one QUIC connection on the socket of an endpoint."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from aioquic.quic import events
from aioquic.quic.connection import NetworkAddress
from aioquic.quic.packet import QuicErrorCode

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.transport.contract import Buffer, Channel, LinkStatistics, Path
from meshllm.transport.linger import Linger
from meshllm_quic.link.link import QuicLink
from meshllm_quic.link.machine import PEER, STREAMS, ConnectionMachine
from meshllm_quic.path.path_control import PathControl
from meshllm_quic.wire.lanes import HELLO
from meshllm_quic.wire.routes import Direct, Route

MAX_UNSENT_BYTES = 256 * 1024
"""Unsent bytes passed to QUIC per stream; bounds the DATA that later CONTROL competes with."""
KEEP_ALIVE_S = 10.0
"""Silence before a PING is sent; two may be lost before the idle timeout."""
CLOSE_WAIT_S = 0.5
"""How long `QuicLink.close` waits until all data is acknowledged; then `Linger` applies."""
OPEN_S = 5.0
"""Timeout of the handshake."""
REFUSED_S = 0.05
REFUSED_ROUNDS = 3
"""After its host refuses a datagram, a peer has this many rounds to answer a PING, each of at least
`REFUSED_S` and two round trips: its acknowledgement may be delayed by 25 ms. A refusal (ICMP, RFC
9000 section 14.2.1) can be forged: it ends no link whose peer sends anything in that time. More
than one proves no more, and hosts send few per second."""
TICK_S = 1e-6
GRACE_S = 0.5
"""A timer that is this late means that the process was suspended: what the peer sent meanwhile is
read first, and it gets as long again to answer."""
REFUSED: Final = 1
BROKEN: Final = 2
"""Error codes of CONNECTION_CLOSE besides 0: peer refused, protocol violation."""

_CHANNELS: Final = {stream: channel for channel, stream in STREAMS.items()}


class Host(Protocol):
    """What a connection needs from its endpoint."""

    def send(self, route: Route, datagrams: Sequence[bytes]) -> None:
        """Send the datagrams of a connection."""
        ...

    def bind(self, connection_id: bytes, connection: "Connection") -> None:
        """Route datagrams for this connection id to the connection."""
        ...

    def unbind(self, connection_id: bytes) -> None:
        """Stop routing datagrams for this connection id."""
        ...

    def opened(self, connection: "Connection") -> None:
        """Note that the handshake is complete and both keys are verified."""
        ...

    def note_authentication(self, connection: "Connection", *, is_authenticated: bool) -> None:
        """Note whether the peer is authenticated."""
        ...

    def closing(self, connection: "Connection") -> None:
        """Note that the application has closed the link."""
        ...

    def gone(self, connection: "Connection") -> None:
        """Remove a closed connection."""
        ...


class Connection:
    """Drives one `ConnectionMachine`, and is the `Wire` of one link.

    During the handshake, the client rotates through ``routes`` until it receives something, and the
    server answers on the route of the last valid datagram. After that only the path driver changes
    the route.
    """

    path_driver: PathControl

    def __init__(
        self, host: Host, machine: ConnectionMachine, routes: Sequence[Route], address: str
    ) -> None:
        self.machine = machine
        self.route = routes[0]
        self._routes = deque(routes)
        self.link = QuicLink(self, address)
        self.is_open = False
        self.expected: bytes | None = None
        """The key that the peer must have; None accepts any."""
        self.is_unknown = False
        """Whether the relay has reported the peer as not registered."""
        self.was_unproven = False
        """Whether the application has accepted the link and authenticates its peer itself."""
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._decided = asyncio.Event()  # the handshake has succeeded or failed
        self._refusal: MeshError | None = None
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._fired_at = 0.0
        self._was_late = False  # a timer, and nothing was received since
        self._soon: asyncio.Handle | None = None
        self._linger = Linger(self._left, self.abort)
        self._keep_alive_at = self._loop.time() + KEEP_ALIVE_S
        self._open_by = self._loop.time() + OPEN_S
        self._rounds = 0  # since a refusal
        self._round_end: float | None = None
        self._finished: set[Channel] = set()
        self._hellos: set[Channel] = set()
        self._is_proven = False
        self.close_datagram = b""
        """The datagram with CONNECTION_CLOSE; sent again to a peer that missed it."""

    async def wait_open(self) -> None:
        """Wait for the handshake; raise `LinkLost` or `PeerFault`."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    @property
    def was_answered(self) -> bool:
        """Whether the client has received anything from one of its routes."""
        return not self._routes

    def take(self) -> None:
        """Note that the application has accepted the link."""
        self.note_authentication(is_authenticated=True)

    def connect(self) -> None:
        """Start the handshake as the client."""
        self.machine.connect(PEER, now=self._loop.time())
        self._transmit()

    def receive(self, datagram: bytes, route: Route, now: float) -> None:
        """Receive a datagram from ``route``; call `work` afterwards."""
        self._keep_alive_at = now + KEEP_ALIVE_S
        self._rounds, self._round_end, self._was_late = 0, None, False
        before = 0 if self.is_open else self.machine.heard
        try:
            self.machine.receive_datagram(datagram, PEER, now)
        except PeerFault as fault:
            self._break(self._fault(str(fault)))
        if not self.is_open and self._accepts_route(route, before):
            self.route = route
            self._routes.clear()

    def refused(self, now: float) -> None:
        """Note that the peer's host refused a datagram: its process may have ended."""
        if self._round_end is None and self.is_open and not self.machine.is_over:
            self._begin_round(now)

    def _begin_round(self, now: float) -> None:
        self._rounds += 1
        self._round_end = now + max(REFUSED_S, 2 * (self.machine.round_trip_s or 0.0))
        self.machine.send_ping(0)
        self.transmit_soon()

    def work(self) -> None:
        """Handle the events of received datagrams, and send the results."""
        self._handle_events()
        if self._gone.is_set():
            return
        self.link.flush()
        if self.link.has_all and not self.machine.is_over:
            self.machine.close()  # the peer has closed, and all of its data was received
        self.transmit_soon()  # after the woken reader has run: its reply carries the ACK

    def room(self, channel: Channel) -> int:
        """Return how many bytes the stream accepts now."""
        if channel in self._finished or not self.machine.is_open(channel):
            return 0
        return MAX_UNSENT_BYTES - self.machine.unsent(channel)

    def write(self, channel: Channel, data: Buffer) -> None:
        """Append a copy of the bytes to a stream."""
        self.machine.write(channel, data)

    def finish(self) -> None:
        """Send FIN on both streams after the written data."""
        for channel in Channel:
            if channel not in self._finished and self.machine.is_open(channel):
                self._finished.add(channel)
                self.machine.finish(channel)

    def grant(self, channel: Channel, offset: int) -> None:
        """Raise the flow-control limit of a stream to ``offset``."""
        self.machine.grant(channel, offset)

    def transmit_soon(self) -> None:
        """Send written data and grants in the next iteration of the event loop."""
        if self._soon is None and not self._gone.is_set():
            self._soon = self._loop.call_soon(self._transmit)

    def fail(self, reason: MeshError, code: int = BROKEN) -> None:
        """Close the connection immediately, for this reason."""
        self.link.end(reason)
        self.machine.close(error_code=code)
        self._decide(reason)
        self.transmit_soon()

    def abort(self) -> None:
        """Close the connection immediately."""
        self.link.end()
        self.machine.close()
        try:
            self._transmit()
        finally:
            self._leave()

    async def wait_closed(self) -> None:
        """Wait up to `CLOSE_WAIT_S` for the end of the connection; then leave it to a timer."""
        if not self._gone.is_set():
            self._host.closing(self)
            self._linger.start()
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self._gone.wait()
        except TimeoutError:
            pass

    def note_authentication(self, *, is_authenticated: bool) -> None:
        """Pass on whether the peer is authenticated."""
        self.was_unproven |= not is_authenticated
        self._host.note_authentication(self, is_authenticated=is_authenticated)
        self.path_driver.note_authentication(is_authenticated=is_authenticated)

    @property
    def peer_host(self) -> str:
        """The host that the peer's packets come from; empty if they are relayed."""
        return self.route.address[0].partition("%")[0] if isinstance(self.route, Direct) else ""

    def describe(self, statistics: LinkStatistics) -> LinkStatistics:
        """Add the path statistics."""
        return replace(
            statistics,
            round_trip_s=self.machine.round_trip_s,
            bytes_per_s=self.machine.bytes_per_s,
            path=Path.DIRECT if isinstance(self.route, Direct) else Path.RELAY,
            path_reason=self.path_driver.reason,
        )

    def _transmit(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._gone.is_set():
            return
        self._send_all(self._now())
        if self.machine.is_over:
            self._leave()
        elif not self._gone.is_set():
            self._arm()

    def _send_all(self, now: float) -> None:
        self.machine.acknowledge_with_data(now)
        while datagrams := self._datagrams(now):
            if self._routes:
                self._routes.rotate(-1)
                self.route = self._routes[-1]
            self._host.send(self.route, [datagram for datagram, _ in datagrams])
            self.path_driver.sent(now)
            if self.machine.is_closing:
                self.close_datagram = datagrams[-1][0]
            if not self.link.unsent:
                break
            self.link.flush()

    def _datagrams(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        """Return the datagrams to send; none if none can be, which ends the connection."""
        try:
            return self.machine.datagrams_to_send(now)
        except PeerFault as fault:
            self._break(self._fault(str(fault)))
            return []

    def _now(self) -> float:
        """Return the time, never before a fired deadline: loop timers may fire early."""
        return max(self._fired_at, self._loop.time())

    def _arm(self) -> None:
        """Set the timer; an earlier one stays and is set again when it fires, which is cheaper."""
        at = min(self.machine.get_timer() or self._keep_alive_at, self._keep_alive_at)
        if self.path_driver.deadline is not None:
            at = min(at, self.path_driver.deadline)
        if not self.is_open:
            at = min(at, self._open_by)
        if self._round_end is not None:
            at = min(at, self._round_end)
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._expire, at)

    def _expire(self, at: float) -> None:
        self._timer = None
        self._fired_at = at + TICK_S
        now = self._now()
        self._notice_suspension(at, now)
        if now >= self._open_by and not self.is_open:
            self._decide(LinkLost(self._silence()))
            self.abort()
            return
        if self._round_end is not None and now >= self._round_end:
            if self._rounds == REFUSED_ROUNDS:
                self.link.end(LinkLost("The peer no longer listens at its address"))
                self.abort()
                return
            self._begin_round(now)
        if now >= self._keep_alive_at:
            self._keep_alive_at = now + KEEP_ALIVE_S
            if self.is_open:
                self.machine.send_ping(0)
        if self.path_driver.deadline is not None and now >= self.path_driver.deadline:
            self.path_driver.expire(now)
        due = self.machine.get_timer()
        if due is not None and now >= due:
            self.machine.handle_timer(now)
        self.work()

    def _notice_suspension(self, at: float, now: float) -> None:
        if now < at + GRACE_S or self._was_late:
            return
        until, self._was_late = now + GRACE_S, True
        self._open_by = max(self._open_by, until)
        if self._round_end is not None:
            self._round_end = max(self._round_end, until)
        self.machine.extend_idle(until)

    def _handle_events(self) -> None:
        while not self._gone.is_set() and (event := self.machine.next_event()) is not None:
            match event:
                case events.StreamDataReceived():
                    self._take(event)
                case events.HandshakeCompleted():
                    self._verify()
                case events.ConnectionIdIssued():
                    self._host.bind(event.connection_id, self)
                case events.ConnectionIdRetired():
                    self._host.unbind(event.connection_id)
                case events.StreamReset() | events.StopSendingReceived():
                    self.fail(self._fault("reset a stream"))
                case _:
                    pass

    def _take(self, event: events.StreamDataReceived) -> None:
        if not self._is_proven or self.machine.is_closing:
            return
        channel = _CHANNELS.get(event.stream_id)
        if channel is None:
            self.fail(self._fault(f"opened stream {event.stream_id}"))
            return
        try:
            records = self.link.arrived(channel, event.data, is_last=event.end_stream)
            for kind, body in records:
                if kind == HELLO:
                    self._note_hello(channel)
                else:
                    self.path_driver.receive_record(kind, body)
        except PeerFault as fault:
            self.fail(self._fault(str(fault)))

    def _verify(self) -> None:
        """Check the authenticated key of the peer; no stream data was read before."""
        key = self.machine.peer_key
        if key is None or self.expected not in (None, key):
            what = "a different key than its address names" if key else "no Ed25519 certificate"
            self.fail(PeerFault(f"`{self.link.address}` has {what}"), REFUSED)
            return
        self.link.peer_key = key
        self._is_proven = True
        if self.machine.is_client:
            for channel in Channel:
                self.link.put_record(HELLO, b"", channel)
            self._open()

    def _open(self) -> None:
        self.is_open = True
        self._host.opened(self)
        self._decide(None)

    def _decide(self, refusal: MeshError | None) -> None:
        if not self._decided.is_set():
            self._refusal = refusal
            self._decided.set()

    def _note_hello(self, channel: Channel) -> None:
        """Note the HELLO of a stream; with both, the server's side is open."""
        self._hellos.add(channel)
        if len(self._hellos) == len(Channel) and not (self.is_open or self.machine.is_client):
            self._open()

    def _accepts_route(self, route: Route, before: int) -> bool:
        """Return whether to answer on ``route``: a known connection id alone proves nothing."""
        if self.machine.is_client:
            return route in self._routes
        return self.machine.heard > before

    def _break(self, fault: PeerFault) -> None:
        """Drop the connection without CONNECTION_CLOSE: the machine's state is not usable."""
        self.link.end(fault)
        self._decide(fault)
        self._leave()

    def _fault(self, why: str) -> PeerFault:
        return PeerFault(f"Protocol violation by `{self.link.address}`: {why}")

    def _left(self) -> int:
        return self.link.unsent + self.machine.unacknowledged()

    def _leave(self) -> None:
        """Release the connection; the endpoint handles the rest of the closing period."""
        if self._gone.is_set():
            return
        self._gone.set()
        self._linger.cancel()
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self.link.end()
        self.path_driver.end()
        self._decide(LinkLost(self._why()))
        self._host.gone(self)

    def _silence(self) -> str:
        why = ": not registered at its relay" if self.is_unknown else ""
        return f"No answer from `{self.link.address}` within {OPEN_S:g} s{why}"

    def _why(self) -> str:
        reason = self.machine.close_reason
        if reason is None or reason[0] == QuicErrorCode.NO_ERROR:
            return f"`{self.link.address}` closed the connection during the handshake"
        return f"`{self.link.address}` rejected the connection: {reason[1] or hex(reason[0])}"
