"""Listening sockets and a virtual clock for tests of simulated networks."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec

from meshllm.testing.clock import run_virtual
from meshllm_quic.net.network import Address, DatagramNetwork, Socket

P = ParamSpec("P")


def virtual(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run a test on a virtual clock."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


@dataclass
class Ear:
    """A socket and the datagrams that it received."""

    socket: Socket
    batches: list[Sequence[tuple[bytes, Address]]] = field(default_factory=list)

    @property
    def heard(self) -> list[tuple[bytes, Address]]:
        return [each for batch in self.batches for each in batch]

    @property
    def said(self) -> list[bytes]:
        return [data for data, _ in self.heard]

    @property
    def sources(self) -> list[Address]:
        return [source for _, source in self.heard]

    @property
    def address(self) -> Address:
        return self.socket.hosts()[0], self.socket.port

    def send(self, to: Address, data: bytes = b"hello") -> None:
        self.socket.send([data], to)


async def ear(host: DatagramNetwork, port: int = 0, bound: str | None = None) -> Ear:
    batches: list[Sequence[tuple[bytes, Address]]] = []
    return Ear(await host.open(bound, port, batches.append), batches)


async def seen_as(ears: Sequence[Ear], sender: Ear) -> list[Address]:
    """Let one send to several, and return the source address that they see."""
    for each in ears:
        sender.send(each.address)
    await asyncio.sleep(1)
    return [each.sources[-1] for each in ears]
