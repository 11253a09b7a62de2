"""The promises of links are checked: each broken link here breaks one of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from meshllm.testing.clock import VirtualLoop, run_virtual
from meshllm.testing.transports import check_transport
from meshllm.transport.contract import (
    Buffer,
    Channel,
    ImmediateSender,
    Link,
    LinkStatistics,
    checked_size,
)
from meshllm_loopback import LoopbackTransport
from meshllm_loopback.pipe import Pipe
from meshllm_loopback.shaper import Shaper
from tests.builders.wrapped_links import TERMS, Sound, Wrapped, verdict


class Reorders(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        self.count += 1
        if self.count == 10:
            self.held = b"".join(message), channel
            return
        await self.inner.send(message, channel)
        if self.count == 20:
            await self.inner.send([self.held[0]], self.held[1])


class Loses(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        self.count += 1
        if self.count != 100:
            await self.inner.send(message, channel)


class ForgetsParts(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        await self.inner.send(message[:3], channel)


class KeepsTheCallersBuffers(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        self.tasks.append(asyncio.create_task(self.inner.send(message, channel)))


class ReusesItsBuffer(Sound):
    def __init__(self, inner: Link) -> None:
        super().__init__(inner)
        self.buffer = bytearray(2**16)

    async def receive(self) -> tuple[Channel, Buffer]:
        channel, message = await self.inner.receive()
        self.buffer[: len(message)] = message
        return channel, memoryview(self.buffer)[: len(message)]


class NeverBlocks(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        checked_size(message)
        copy = b"".join(message)
        self.tasks.append(asyncio.create_task(self.inner.send([copy], channel)))


class MixesSenders(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        for part in message:
            self.held = self.held[0] + bytes(part), channel
            await asyncio.sleep(0)
        size = checked_size(message)
        whole, rest = self.held[0][:size], self.held[0][size:]
        self.held = rest, channel
        await self.inner.send([whole], channel)


class Truncates(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        await self.inner.send(message if len(message) < 100 else message[:100], channel)


class TakesTooMuch(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        try:
            await self.inner.send(message, channel)
        except ValueError:
            return


class OneQueue(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        await self.inner.send([bytes([channel]), *message])

    async def receive(self) -> tuple[Channel, Buffer]:
        _, message = await self.inner.receive()
        return Channel(message[0]), message[1:]


class SendsHalfWhenCancelled(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        try:
            await self.inner.send(message, channel)
        except asyncio.CancelledError:
            self.tasks.append(asyncio.create_task(self.inner.send([b"half"], channel)))
            raise


class LosesWhenCancelled(Sound):
    async def receive(self) -> tuple[Channel, Buffer]:
        message = await self.inner.receive()
        await asyncio.sleep(0)
        return message


class RepeatsWhenMuchIsRead(Sound):
    async def receive(self) -> tuple[Channel, Buffer]:
        if self.held[0]:
            (message, channel), self.held = self.held, (b"", Channel.DATA)
            return channel, message
        channel, arrived = await self.inner.receive()
        if self.count < 2**23 <= self.count + len(arrived):
            self.held = bytes(arrived), channel
        self.count += len(arrived)
        return channel, arrived


class CountsItsHeaders(Sound):
    @property
    def statistics(self) -> LinkStatistics:
        statistics = self.inner.statistics
        return replace(statistics, bytes_sent=statistics.bytes_sent + 4 * statistics.messages_sent)


class OffersEverything(Sound):
    """Accepts every offer, before waiting messages and after the end."""

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        assert isinstance(self.inner, ImmediateSender)
        if not self.inner.offer(message, channel):
            self.tasks.append(asyncio.create_task(self.inner.send(message, channel)))
        return True


class OffersTwice(Sound):
    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        assert isinstance(self.inner, ImmediateSender)
        return self.inner.offer(message, channel) and self.inner.offer(message, channel)


class ClosesAllAtOnce(Sound):
    everyone: ClassVar[list[Link]] = []

    def __init__(self, inner: Link) -> None:
        super().__init__(inner)
        self.everyone.append(inner)

    async def close(self) -> None:
        for link in self.everyone:
            await link.close()


make_pipe = Pipe.__init__


def make_pipe_data_first(pipe: Pipe, address: str, shaper: Shaper | None) -> None:
    make_pipe(pipe, address, shaper)
    pipe._lanes = dict(reversed(pipe._lanes.items()))


class StopsThisProcess(Sound):
    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.suspend(2 * TERMS.settle_s)
        for _ in range(3):  # timers fire before it is sent
            await asyncio.sleep(0)
        await super().send(message, channel)


def test_a_send_is_not_blocked_because_this_process_was_stopped() -> None:
    run_virtual(check_transport(lambda: Wrapped(StopsThisProcess), replace(TERMS, deadline_s=1e6)))


@pytest.mark.parametrize(
    ("link", "promise"),
    [
        (Reorders, "messages keep their order: DATA differs"),
        (Loses, "messages keep their order: not done in 1000.0 s"),
        (ForgetsParts, "a message is the bytes of its parts: "),
        (ReusesItsBuffer, "a message is the bytes of its parts: "),
        (KeepsTheCallersBuffers, "a message is the bytes of its parts: "),
        (MixesSenders, "senders do not mix: "),
        (Truncates, "the longest message passes: "),
        (TakesTooMuch, "a message too long is refused: "),
        (OffersTwice, "an offer is sent at once or not at all: CONTROL differs"),
        (OffersEverything, "an offer is sent at once or not at all: an offer overtook"),
        (NeverBlocks, "a slow reader blocks the sender: 67108864 B were sent"),
        (OneQueue, "control overtakes waiting data: not done"),
        (SendsHalfWhenCancelled, "a cancelled send is whole or absent: "),
        (LosesWhenCancelled, "a cancelled receive loses nothing: not done"),
        (RepeatsWhenMuchIsRead, "a long stream arrives once: "),
        (CountsItsHeaders, "statistics add up: "),
        (ClosesAllAtOnce, "links of one listener are independent: "),
    ],
)
def test_a_broken_link_is_found(link: type[Sound], promise: str) -> None:
    assert verdict(lambda: Wrapped(link)).startswith(promise)


@pytest.mark.parametrize(
    ("method", "broken", "promise"),
    [
        ("__init__", make_pipe_data_first, "control overtakes waiting data: CONTROL came after"),
        ("end", Pipe.drop, "the other side drains before it is lost: "),
        ("drop", lambda pipe: setattr(pipe, "_dropped", True), "closing wakes the readers: "),
        ("seal", lambda pipe: setattr(pipe, "_sealed", True), "closing wakes a blocked sender: "),
    ],
)
def test_a_broken_pipe_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, broken: Callable[..., None], promise: str
) -> None:
    monkeypatch.setattr(Pipe, method, broken)

    assert verdict(LoopbackTransport).startswith(promise)
