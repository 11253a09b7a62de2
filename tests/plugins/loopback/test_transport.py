"""Loopback transport: contract, cost of a message, and shaping."""

import asyncio
from typing import Any

import pytest

from meshllm.errors import LinkLost, UserError
from meshllm.testing.clock import VirtualLoop, run_virtual
from meshllm.testing.transports import Terms, check_transport
from meshllm.transport.contract import Channel, Link
from meshllm_loopback import LoopbackTransport, TrafficShape

CONTROL, DATA = Channel


async def meet(transport: LoopbackTransport) -> tuple[Link, Link]:
    """Link two ends over a temporary listener."""
    async with transport.listen("loopback:b") as listener:
        dialled = await transport.dial("loopback:b")
        return dialled, await anext(aiter(listener.links()))


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_loopback_implements_the_contract() -> None:
    await check_transport(LoopbackTransport, Terms(settle_s=0.01))


@pytest.mark.parametrize(
    "shape",
    [
        TrafficShape(delay_s=0.05),
        TrafficShape(delay_s=0.05, jitter_s=0.2, bytes_per_s=12.5e6, loss=0.2, seed=1),
        TrafficShape(bytes_per_s=1e9, loss=0.5, seed=2),
    ],
)
def test_a_shaped_link_implements_the_contract(shape: TrafficShape) -> None:
    terms = Terms(settle_s=100, deadline_s=100_000)

    run_virtual(check_transport(lambda: LoopbackTransport(shape), terms))


def test_a_message_costs_one_wake_up_and_no_task() -> None:
    class CountingLoop(VirtualLoop):
        wake_ups = 0

        def call_soon(self, *args: Any, **kwargs: Any) -> asyncio.Handle:  # type: ignore[override]  # handed on
            self.wake_ups += 1
            return super().call_soon(*args, **kwargs)

    async def read(link: Link) -> None:
        for _ in range(101):
            await link.receive()

    async def main(loop: CountingLoop) -> int:
        one, other = await meet(LoopbackTransport())
        reader = asyncio.create_task(read(other))
        await asyncio.sleep(0)
        before = loop.wake_ups
        for _ in range(100):
            await one.send([b"header", b"tensor"])
            await asyncio.sleep(0)  # a wake-up of this task's own
        spent = loop.wake_ups - before
        assert asyncio.all_tasks() == {reader, asyncio.current_task()}
        await one.send([])
        await reader
        return spent

    loop = CountingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(main(loop)) == 100 + 100


async def test_the_receiver_owns_what_it_reads() -> None:
    one, other = await meet(LoopbackTransport())
    part = bytearray(b"before")

    await one.send([part])
    part[:] = b"after!"

    assert await other.receive() == (DATA, b"before")


async def test_instances_are_separate_networks() -> None:
    here, there = LoopbackTransport(), LoopbackTransport()

    async with here.listen("loopback:b"), there.listen("loopback:b"):
        pass

    async with here.listen("loopback:b"):
        with pytest.raises(LinkLost, match="No listener at `loopback:b`"):
            await there.dial("loopback:b")


async def test_a_free_name_is_chosen() -> None:
    transport = LoopbackTransport()

    async with transport.listen("loopback:1"), transport.listen() as listener:
        assert listener.address == "loopback:2"


@pytest.mark.parametrize("address", ["loopback:", "tcp:1", ""])
async def test_invalid_addresses_are_rejected(address: str) -> None:
    with pytest.raises(UserError, match=f"Invalid loopback address `{address}`"):
        await LoopbackTransport().dial(address)


async def test_an_address_is_reusable_after_its_listener_closes() -> None:
    transport = LoopbackTransport()

    for _ in range(2):
        async with transport.listen("loopback:b") as listener:
            assert listener.address == "loopback:b"


def test_arrival_times_follow_the_shape() -> None:
    async def main() -> list[tuple[Channel, float]]:
        one, other = await meet(LoopbackTransport(TrafficShape(delay_s=0.25, bytes_per_s=1000)))
        assert now() == 0.5  # dialling takes a round trip
        await one.send([bytes(1000)])
        await one.send([bytes(500)])
        await one.send([bytes(250)], CONTROL)
        return [((await other.receive())[0], now()) for _ in range(3)]

    assert run_virtual(main()) == [(CONTROL, 1.0), (DATA, 1.75), (DATA, 2.25)]


def test_close_arrives_after_all_sent_messages() -> None:
    async def main() -> None:
        one, other = await meet(LoopbackTransport(TrafficShape(delay_s=0.25, bytes_per_s=1000)))
        await one.send([bytes(1000)])
        await one.close()
        await other.send([b"this side does not know yet"])
        await other.receive()
        assert now() == 1.75
        with pytest.raises(LinkLost):
            await other.receive()
        with pytest.raises(LinkLost):
            await other.send([b"?"])

    run_virtual(main())


@pytest.mark.parametrize("seed", range(10))
def test_close_arrives_after_retransmitted_messages(seed: int) -> None:
    async def main() -> None:
        one, other = await meet(LoopbackTransport(TrafficShape(delay_s=0.25, loss=0.7, seed=seed)))
        await one.send([b"late"], CONTROL)
        await one.close()
        assert await other.receive() == (CONTROL, b"late")

    run_virtual(main())


def test_messages_in_flight_are_dropped_when_the_reader_closes() -> None:
    async def main() -> None:
        one, other = await meet(LoopbackTransport(TrafficShape(delay_s=0.25)))
        await one.send([b"under way"])
        await other.close()
        await asyncio.sleep(1)
        with pytest.raises(LinkLost):
            await other.receive()
        assert other.statistics.messages_received == 0

    run_virtual(main())


def test_overtaking_of_links_is_reproducible() -> None:
    async def main() -> list[int]:
        transport = LoopbackTransport(TrafficShape(delay_s=0.05, jitter_s=0.05, seed=7))
        order: list[int] = []

        async def read(link: Link, number: int) -> None:
            await link.receive()
            order.append(number)

        links = [await meet(transport) for _ in range(6)]
        async with asyncio.TaskGroup() as group:
            for number, (one, other) in enumerate(links):
                await one.send([b"x"])
                group.create_task(read(other, number))
        return order

    order = run_virtual(main())

    assert order != sorted(order)
    assert run_virtual(main()) == order


@pytest.mark.parametrize("shape", [None, TrafficShape(bytes_per_s=1.25e6)])
async def test_statistics_contain_the_rate_of_the_shape(shape: TrafficShape | None) -> None:
    transport = LoopbackTransport(shape)
    async with transport.listen() as listener:
        link = await transport.dial(listener.address)

        assert link.statistics.bytes_per_s == (shape.bytes_per_s if shape else None)
        await link.close()
