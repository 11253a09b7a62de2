"""One QUIC connection on the socket of an endpoint."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from aioquic.quic import events
from aioquic.quic.packet import QuicErrorCode

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.transport.contract import Buffer, Channel, LinkStatistics, Path
from meshllm_quic.link.link import Link
from meshllm_quic.link.machine import PEER, STREAMS, Machine
from meshllm_quic.path.guiding import Guiding
from meshllm_quic.wire.lanes import HELLO
from meshllm_quic.wire.routes import Direct, Route

HANDED_BYTES = 256 * 1024
"""Handed to QUIC and not yet sent: CONTROL that comes later shares the line with so much DATA."""
KEEP_ALIVE_S = 10.0
"""Of silence before a ping: two may be lost before the other side gives up."""
GONE_S = 0.5
"""Who closes a link waits so long until all has arrived, and then leaves it to `LINGER_S`."""
LINGER_S = 5.0
"""A closing connection is cut when the other side takes nothing for so long."""
OPEN_S = 5.0
"""For the handshake."""
TICK_S = 1e-6
REFUSED: Final = 1
BROKEN: Final = 2
"""What a connection is closed with, beside 0: who you are, or what you said."""

_CHANNELS: Final = {stream: channel for channel, stream in STREAMS.items()}


class Host(Protocol):
    """What a connection needs of its endpoint."""

    def send(self, route: Route, datagrams: Sequence[bytes]) -> None:
        """Send datagrams of a connection."""
        ...

    def bind(self, connection_id: bytes, connection: "Connection") -> None:
        """Bring what arrives for that id to the connection."""
        ...

    def unbind(self, connection_id: bytes) -> None:
        """Drop what arrives for that id."""
        ...

    def opened(self, connection: "Connection") -> None:
        """Take note that both sides have proven who they are."""
        ...

    def know(self, connection: "Connection", *, is_stranger: bool) -> None:
        """Take note whether the other side has still to say who it is."""
        ...

    def gone(self, connection: "Connection") -> None:
        """Forget a connection that is closed."""
        ...


class Connection:
    """Drives one machine, and is the wire of one link.

    Who dials sends its first datagrams over all ``routes`` in turn, until something is heard; who
    is dialled answers on the way that was last heard from, until it is open. After that a guide
    alone moves the route.
    """

    guide: Guiding

    def __init__(self, host: Host, machine: Machine, routes: Sequence[Route], address: str) -> None:
        self.machine = machine
        self.route = routes[0]
        self._routes = deque(routes)
        self.link = Link(self, address)
        self.is_open = False
        self.expected: bytes | None = None
        """The key that the other side must have; None accepts any."""
        self.is_unknown = False
        """Whether its relay has said that it does not know the other side."""
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._decided = asyncio.Event()  # whether it opens
        self._refusal: MeshError | None = None
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._rung = 0.0
        self._soon: asyncio.Handle | None = None
        self._last_call: asyncio.TimerHandle | None = None
        self._keep_alive_at = self._loop.time() + KEEP_ALIVE_S
        self._open_by = self._loop.time() + OPEN_S
        self._finished: set[Channel] = set()
        self._greeted: set[Channel] = set()
        self._is_proven = False
        self.last_words = b""
        """The datagram that closes it; sent again to who did not get it."""

    async def wait_open(self) -> None:
        """Wait for the handshake; raise `LinkLost` or `PeerFault`."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    def take(self) -> None:
        """Note that the application has the link."""
        self.link.take()
        self.know(is_stranger=False)

    def connect(self) -> None:
        """Begin, as the client."""
        self.machine.connect(PEER, now=self._loop.time())
        self._transmit()

    def receive(self, datagram: bytes, route: Route, now: float) -> None:
        """Take a datagram that came that way; `work` is to follow."""
        self._keep_alive_at = now + KEEP_ALIVE_S
        before = 0 if self.is_open else self.machine.heard
        try:
            self.machine.receive_datagram(datagram, PEER, now)
        except PeerFault as fault:
            self._break(self._fault(str(fault)))
        if not self.is_open and self._is_way(route, before):
            self.route = route
            self._routes.clear()

    def work(self) -> None:
        """Do what follows from what arrived."""
        self._handle_events()
        if self._gone.is_set():
            return
        self.link.flush()
        if self.link.has_all and not self.machine.is_over:
            self.machine.close()  # the other side has closed, and all of it has arrived
        self.transmit_soon()  # after the reader that was woken: its answer carries the ACK

    def room(self, channel: Channel) -> int:
        """Count the bytes that the stream takes now."""
        if channel in self._finished or not self.machine.is_open(channel):
            return 0
        return HANDED_BYTES - self.machine.unsent(channel)

    def write(self, channel: Channel, data: Buffer) -> None:
        """Copy bytes to the end of a stream."""
        self.machine.write(channel, data)

    def finish(self) -> None:
        """End both streams after what was written."""
        for channel in Channel:
            if channel not in self._finished and self.machine.is_open(channel):
                self._finished.add(channel)
                self.machine.finish(channel)

    def grant(self, channel: Channel, offset: int) -> None:
        """Let the other side send up to that byte of a stream."""
        self.machine.grant(channel, offset)

    def transmit_soon(self) -> None:
        """Send in the next turn of the loop what was written and granted."""
        if self._soon is None and not self._gone.is_set():
            self._soon = self._loop.call_soon(self._transmit)

    def fail(self, reason: MeshError, code: int = BROKEN) -> None:
        """Close at once, for that reason."""
        self.link.end(reason)
        self.machine.close(error_code=code)
        self._decide(reason)
        self.transmit_soon()

    def abort(self) -> None:
        """Close at once."""
        self.link.end()
        self.machine.close()
        self._transmit()
        self._leave()

    async def wait_gone(self) -> None:
        """Wait until the connection is closed, or leave that to a timer."""
        if self._last_call is None and not self._gone.is_set():
            self._call(before=-1)
        try:
            async with asyncio.timeout(GONE_S):
                await self._gone.wait()
        except TimeoutError:
            pass

    def know(self, *, is_stranger: bool) -> None:
        """Pass on whether the other side has still to say who it is."""
        self._host.know(self, is_stranger=is_stranger)
        self.guide.know(is_stranger=is_stranger)

    def describe(self, statistics: LinkStatistics) -> LinkStatistics:
        """Add what is known of the path."""
        return replace(
            statistics,
            round_trip_s=self.machine.round_trip_s,
            bytes_per_s=self.machine.bytes_per_s,
            path=Path.DIRECT if isinstance(self.route, Direct) else Path.RELAY,
            path_reason=self.guide.reason,
        )

    def _transmit(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._gone.is_set():
            return
        now = self._now()
        self.machine.acknowledge_with_data(now)
        while datagrams := self.machine.datagrams_to_send(now):
            if self._routes:
                self._routes.rotate(-1)
                self.route = self._routes[-1]
            self._host.send(self.route, [datagram for datagram, _ in datagrams])
            self.guide.sent(now)
            if self.machine.is_closing:
                self.last_words = datagrams[-1][0]
            if not self.link.unsent:
                break
            self.link.flush()
        if self.machine.is_over:
            self._leave()
        else:
            self._arm()

    def _now(self) -> float:
        """Tell the time; a loop may ring before what it was set to, and aioquic wants it passed."""
        return max(self._rung, self._loop.time())

    def _arm(self) -> None:
        """Set the timer; one that fires too early sets itself again, which is cheaper than two."""
        at = min(self.machine.get_timer() or self._keep_alive_at, self._keep_alive_at)
        if self.guide.deadline is not None:
            at = min(at, self.guide.deadline)
        if not self.is_open:
            at = min(at, self._open_by)
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._expire, at)

    def _expire(self, at: float) -> None:
        self._timer = None
        self._rung = at + TICK_S
        now = self._now()
        if now >= self._open_by and not self.is_open:
            self.abort()
            return
        if now >= self._keep_alive_at:
            self._keep_alive_at = now + KEEP_ALIVE_S
            if self.is_open:
                self.machine.send_ping(0)
        if self.guide.deadline is not None and now >= self.guide.deadline:
            self.guide.expire(now)
        due = self.machine.get_timer()
        if due is not None and now >= due:
            self.machine.handle_timer(now)
        self.work()

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
        channel = _CHANNELS[event.stream_id]
        try:
            words = self.link.arrived(channel, event.data, is_last=event.end_stream)
            for kind, body in words:
                if kind == HELLO:
                    self._greet(channel)
                else:
                    self.guide.hear(kind, body)
        except PeerFault as fault:
            self.fail(self._fault(str(fault)))

    def _verify(self) -> None:
        """Look at who the other side has proven to be; nothing of it was read before."""
        key = self.machine.peer_key
        if key is None or self.expected not in (None, key):
            what = "another key than its address names" if key else "no Ed25519 certificate"
            self.fail(PeerFault(f"`{self.link.address}` has {what}"), REFUSED)
            return
        self.link.peer_key = key
        self._is_proven = True
        if self.machine.is_client:
            for channel in Channel:
                self.link.put_word(HELLO, b"", channel)
            self._open()

    def _open(self) -> None:
        self.is_open = True
        self._host.opened(self)
        self._decide(None)

    def _decide(self, refusal: MeshError | None) -> None:
        if not self._decided.is_set():
            self._refusal = refusal
            self._decided.set()

    def _greet(self, channel: Channel) -> None:
        """Open the server's side when the client has opened both streams."""
        self._greeted.add(channel)
        if len(self._greeted) == len(Channel) and not (self.is_open or self.machine.is_client):
            self._open()

    def _is_way(self, route: Route, before: int) -> bool:
        """Tell whether to answer there; whoever knows an id may send something to it."""
        if self.machine.is_client:
            return route in self._routes
        return self.machine.heard > before

    def _break(self, fault: PeerFault) -> None:
        """Leave without a word: the machine is in no state to be asked for one."""
        self.link.end(fault)
        self._decide(fault)
        self._leave()

    def _fault(self, why: str) -> PeerFault:
        return PeerFault(f"`{self.link.address}` broke the rules: {why}")

    def _call(self, before: int) -> None:
        left = self.link.unsent + self.machine.unacknowledged()
        if left == before:
            self.abort()
        else:
            self._last_call = self._loop.call_later(LINGER_S, self._call, left)

    def _leave(self) -> None:
        """Forget the connection: what is left of closing is the endpoint's business."""
        if self._gone.is_set():
            return
        self._gone.set()
        for handle in (self._timer, self._soon, self._last_call):
            if handle is not None:
                handle.cancel()
        self.link.end()
        self.guide.end()
        self._decide(LinkLost(self._why()))
        self._host.gone(self)

    def _why(self) -> str:
        reason = self.machine.close_reason
        if reason is None or reason[0] == QuicErrorCode.NO_ERROR:
            return f"`{self.link.address}` closed the connection before a link was open"
        return f"`{self.link.address}` opened no link: {reason[1] or hex(reason[0])}"
