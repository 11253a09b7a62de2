"""A loopback transport that changes messages in transit, or cuts links."""

from collections.abc import Callable, Sequence

from meshllm.errors import LinkLost
from meshllm.testing.counting import CountingTransport
from meshllm.transport.contract import Buffer, Channel, Link, LinkStatistics
from meshllm_loopback import LoopbackTransport


class Tampering(CountingTransport):
    """Changes messages in transit: ``change`` gets each one, and may close the link instead."""

    def __init__(self, change: Callable[[int, bytes], bytes | None]) -> None:
        super().__init__(LoopbackTransport())
        self._change = change

    async def dial(self, address: str) -> Link:
        return _Tampered(await super().dial(address), self)

    def change(self, message: bytes) -> bytes | None:
        return self._change(sum(channel is Channel.DATA for channel, _ in self.sent), message)


class _Tampered:
    def __init__(self, inner: Link, transport: Tampering) -> None:
        self._inner = inner
        self._transport = transport
        self.receive = inner.receive
        self.close = inner.close

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        whole = b"".join(message)
        changed = self._transport.change(whole) if channel is Channel.DATA else whole
        if changed is None:
            await self._inner.close()
            raise LinkLost("the link was cut")
        await self._inner.send([changed], channel)

    @property
    def statistics(self) -> LinkStatistics:
        return self._inner.statistics
