"""Drivers of the links to the neighbours: each runs a `NeighbourLink` and its send queues."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from math import inf
from typing import NamedTuple, assert_never

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.names import SessionId
from meshllm.node.timer import loop_time
from meshllm.protocol.session.codec import MalformedMessage, decode, encode
from meshllm.protocol.session.link import BEAT, Action, Deliver, Lost, NeighbourLink, Send
from meshllm.protocol.session.messages import (
    Cancel,
    Close,
    Data,
    Delivered,
    Forward,
    Heartbeat,
    Malformed,
    Message,
)
from meshllm.protocol.session.stage import MAX_WAITING_BYTES
from meshllm.protocol.trust.handshake import ALL_FEATURES, Features
from meshllm.transport import contract
from meshllm.transport.gathering import together

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = MAX_WAITING_BYTES
"""Of messages that wait to be sent, until the rank says how many bytes it has for them."""
_OBJECT_BYTES = 1024  # of a waiting message besides its payload


class _Encoded(NamedTuple):
    kind: type[Message]
    parts: list[contract.Buffer]
    bytes: int
    session: SessionId | None
    """Of Data; else None."""
    gen: int


class RingLink:
    """Sends to and receives from one neighbour until the link is lost."""

    def __init__(
        self,
        link: contract.Link,
        machine: NeighbourLink,
        blame: Callable[[], None],
        features: Features = ALL_FEATURES,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve a link; ``blame`` counts a fault of the neighbour, which has ``features``.

        ``ended`` is called once the link is not used any more.
        """
        self.blame = blame
        self._ended = ended
        self.features = features
        self._link = link
        self._immediate = link if isinstance(link, contract.ImmediateSender) else None
        self._machine = machine
        self._own = deque[_Encoded]()  # the link's own, sent first
        self._control = deque[_Encoded]()
        self._data = deque[_Encoded]()
        self._queued_bytes = 0
        self.most_bytes = MAX_QUEUED_BYTES
        """Bytes for the messages that wait to be sent, and for what is held beside them."""
        self._held: Callable[[], int] = lambda: 0
        self._is_full = asyncio.Event()  # more than may wait did
        self._wake = asyncio.Event()
        self._is_idle = False  # the writer has nothing to send
        self._debug = logger.isEnabledFor(logging.DEBUG)

    @property
    def round_trip_us(self) -> int:
        """Smoothed round trip to the neighbour; 0 until it is measured."""
        return self._machine.round_trip_us

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the link to the neighbour; None if the transport does not know it."""
        return self._link.statistics.bytes_per_s

    @property
    def is_waiting(self) -> bool:
        """Whether rows wait to be sent."""
        return bool(self._data)

    @property
    def queued_bytes(self) -> int:
        """Bytes of all messages that wait to be sent."""
        return self._queued_bytes

    def share(self, most_bytes: int, held: Callable[[], int] = lambda: 0) -> None:
        """Let the messages that wait to be sent take this many bytes, less those ``held`` here."""
        self.most_bytes, self._held = most_bytes, held

    def post(self, action: Forward) -> None:
        """Send a message, or queue it; if there is no room for it, the link ends.

        An entry has less in flight, see `meshllm.protocol.session.waiting`, but the previous rank
        may send more than the next one reads.

        If the queues are empty it is sent within this call: waking the writer task would delay the
        step by another round of the event loop.
        """
        if self._is_full.is_set():  # nothing may follow what is missing
            return
        match action.message:  # which overtake rows that the next rank would only drop
            case Close(session):
                self._drop_rows(session)
            case Cancel(session, _, gen):
                self._drop_rows(session, gen)
            case _:
                pass
        queue = self._control if action.control else self._data
        self._add(queue, action.message)
        is_next = len(queue) == 1 and self._next_queue() is queue
        if self._is_idle and is_next and self._offer(queue):
            return
        if self._queued_bytes + self._held() > self.most_bytes:
            self._is_full.set()
        self._wake_writer()

    def together(self) -> AbstractContextManager[None]:
        """Send what is posted inside the context together."""
        return together(self._link)

    async def run(self, deliver: Callable[[Delivered], None]) -> MeshError:
        """Run the link until it is lost, and return the reason; its owner closes it, see ``ended``.

        If cancelled, messages still queued are dropped.
        """
        reasons: list[MeshError] = []
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                group.create_task(self._watch())
                group.create_task(self._read(deliver))
        except* MeshError as errors:
            reasons.extend(error for error in errors.exceptions if isinstance(error, MeshError))
        finally:
            self._ended()
        return reasons[0]

    async def _read(self, deliver: Callable[[Delivered], None]) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            _, buffer = await self._link.receive()  # what it raises may be the fault of the network
            try:
                message = _read_message(buffer)
                if self._debug:
                    logger.debug("< %s, %d B", type(message).__name__, len(buffer))
                actions = self._machine.receive(message, clock())
                for action in actions:
                    self._act(action, deliver)
            except PeerFault:
                self._blame_if_met()
                raise
            if isinstance(message, Malformed) and actions:  # else it is a repetition
                self.blame()
            if self._machine.is_met and (self._control or self._data):
                self._wake_writer()

    def _blame_if_met(self) -> None:
        if self._machine.is_met:  # else the neighbour may follow another plan
            self.blame()

    def _act(self, action: Action, deliver: Callable[[Delivered], None]) -> None:
        match action:
            case Send(message):
                if self._own and self._own[-1].kind is Heartbeat:
                    self._queued_bytes -= self._own.pop().bytes  # unsent: they do not read
                self._add(self._own, message)
                self._wake_writer()
            case Deliver(message):
                deliver(message)
            case Lost(text):
                raise LinkLost(text)
            case _:
                assert_never(action)

    async def _write(self) -> None:
        clock = asyncio.get_running_loop().time
        for action in self._machine.open(clock()):
            self._act(action, _refuse)
        while True:
            while queue := self._next_queue():
                await self._send(queue)
            self._wake.clear()
            self._is_idle = True
            await self._wake.wait()

    def _wake_writer(self) -> None:
        self._is_idle = False
        self._wake.set()

    def _add(self, queue: deque[_Encoded], message: Message) -> None:
        parts = encode(message)
        size = _OBJECT_BYTES + sum(map(len, parts))
        session, gen = (message.session, message.gen) if isinstance(message, Data) else (None, 0)
        queue.append(_Encoded(type(message), parts, size, session, gen))
        self._queued_bytes += size

    def _drop_rows(self, session: SessionId, before: float = inf) -> None:
        """Drop queued rows of a session, or those of a gen ``before`` another."""
        for message in list(self._data):
            if message.session == session and message.gen < before:
                self._data.remove(message)
                self._queued_bytes -= message.bytes

    def _next_queue(self) -> deque[_Encoded] | None:
        if self._own or not self._machine.is_met:
            return self._own or None
        return self._control or self._data or None

    async def _watch(self) -> None:
        """Send beats, and detect silence and a full queue, also while a send waits."""
        clock = asyncio.get_running_loop().time
        while (deadline := self._machine.deadline) is not None:
            # It moves later with every message, and earlier only once: when the link opens.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(deadline - clock(), BEAT)):
                    await self._is_full.wait()
            if self._is_full.is_set():
                text = f"More than {self.most_bytes >> 20} MiB wait for the neighbour to read them"
                raise LinkLost(text)
            for action in self._machine.expire(clock()):
                self._act(action, _refuse)

    def _offer(self, queue: deque[_Encoded]) -> bool:
        """Send the only message of a queue if that does not block; return whether it was sent."""
        if self._immediate is None:
            return False
        try:
            if not self._immediate.offer(queue[0].parts, self._channel(queue)):
                return False
        except (MeshError, ValueError):  # the writer hits it too, and ends the link
            return False
        self._note(self._take(queue))
        return True

    async def _send(self, queue: deque[_Encoded]) -> None:
        message = self._take(queue)
        await self._link.send(message.parts, self._channel(queue))
        self._note(message)

    def _take(self, queue: deque[_Encoded]) -> _Encoded:
        message = queue.popleft()
        self._queued_bytes -= message.bytes
        return message

    def _channel(self, queue: deque[_Encoded]) -> contract.Channel:
        return contract.Channel.DATA if queue is self._data else contract.Channel.CONTROL

    def _note(self, message: _Encoded) -> None:
        if self._debug:
            logger.debug("> %s, %d B", message.kind.__name__, message.bytes - _OBJECT_BYTES)
        self._machine.sent(loop_time())


class Neighbours:
    """The links to the previous and the next rank; sessions travel from one to the other."""

    def __init__(self, previous: RingLink, next_: RingLink) -> None:
        self._previous = previous
        self._next = next_
        self.forward = next_.post
        self.together = next_.together
        self.share = next_.share
        self.blame = previous.blame
        """Call it for each invalid hidden state: the previous rank sent it."""

    @property
    def round_trip_us(self) -> int:
        """Smoothed round trip to the next rank; 0 until it is measured."""
        return self._next.round_trip_us

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the link to the next rank; None if the transport does not know it."""
        return self._next.bytes_per_s

    @property
    def features(self) -> Features:
        """Features that the next rank supports."""
        return self._next.features

    @property
    def helps(self) -> bool:
        """On the entry: whether the last rank, its previous one, can compute logits."""
        return bool(self._previous.features & Features.HELP)

    @property
    def is_waiting(self) -> bool:
        """Whether rows wait to be sent to the next rank."""
        return self._next.is_waiting

    @property
    def queued_bytes(self) -> int:
        """Bytes of the messages that wait to be sent to either rank."""
        return self._previous.queued_bytes + self._next.queued_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes for the messages that wait to be sent, and for what is held beside them."""
        return self._next.most_bytes

    async def run(self, deliver: Callable[[Delivered], None]) -> MeshError:
        """Run both links until one is lost, and return the reason."""
        peers = (self._previous.run(deliver), self._next.run(_refuse))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peer) for peer in peers]
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
        return next(iter(done)).result()


def _read_message(buffer: contract.Buffer) -> Message | Malformed:
    """Decode a message; raise `PeerFault` for one that ends the link."""
    try:
        return decode(buffer)
    except MalformedMessage as fault:
        return fault.message


def _refuse(message: Delivered) -> None:
    """Refuse session messages of the next rank: sessions travel one way."""
    raise PeerFault(f"{type(message).__name__} against the direction of the ring")
