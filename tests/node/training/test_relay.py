"""A relay: to which node batches go, over which links, and what their loss costs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from meshllm.errors import Busy, LinkLost, ModelError, OutOfMemory, PeerFault, TimedOut
from meshllm.names import NodeId, Span, short
from meshllm.node.net.secure import SecureLink
from meshllm.node.training import LayerPass, TrainingRelay, relay, server, transfer
from meshllm.protocol.training.codec import (
    TENSOR_CHUNK_BYTES,
    Direction,
    PassDone,
    StartPass,
    TensorBytes,
    encode,
)
from meshllm.testing.clock import run_virtual
from tests.builders.mesh_members import MeshMember
from tests.builders.training import FORWARD, MODEL, TrainingNode, relay_of, ring
from tests.node.training.conftest import Scenario

BEYOND = LayerPass(MODEL, Span(4, 8), Direction.FORWARD)


@asynccontextmanager
async def running(made: TrainingRelay) -> AsyncIterator[TrainingRelay]:
    task = asyncio.ensure_future(made.run())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_batch_goes_to_the_node_with_the_layers(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        own = TrainingNode()
        async with running(relay_of(attic, attic.me, barn.me, server=own.server)) as made:
            assert await made.spans(MODEL) == [Span(0, 4), Span(4, 8)]
            batch = b"x" * TENSOR_CHUNK_BYTES + b"y"
            results = [await made.compute(asked, batch) for asked in (FORWARD, BEYOND)]

        assert results == [batch[::-1]] * 2
        assert [each.span for each in own.loaded] == [Span(0, 4)]
        assert [each.span for each in node.loaded] == [Span(4, 8)]

    run(scenario)


def test_own_layers_refuse_an_invalid_batch_as_those_of_others_do(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(attic: MeshMember, _: MeshMember, node: TrainingNode) -> None:
        made = relay_of(attic, attic.me, server=node.server)
        await made.compute(FORWARD, b"abc")
        node.loaded[0].error = PeerFault("Batch of 9")

        with pytest.raises(ModelError, match="Batch of 9"):
            await made.compute(FORWARD, b"abc")

    run(scenario)


def test_a_span_that_several_nodes_hold_is_not_computed(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        made = relay_of(attic, attic.me, barn.me, server=node.server)
        for span in (Span(3, 5), Span(7, 9)):
            with pytest.raises(Busy, match="No node holds all layers"):
                await made.compute(LayerPass(MODEL, span, Direction.FORWARD), b"abc")

    run(scenario)


def test_a_ring_is_awaited_for_a_while(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, _: MeshMember, node: TrainingNode) -> None:
        begin = asyncio.get_running_loop().time()
        with pytest.raises(TimedOut, match="No ring holds"):
            await relay_of(attic, server=node.server).compute(FORWARD, b"abc")
        assert asyncio.get_running_loop().time() - begin == pytest.approx(relay.WAIT_S)

    run(scenario)


def test_a_link_is_used_again_until_the_relay_ends(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        links = list[SecureLink]()

        async def serve(link: SecureLink) -> None:
            links.append(link)
            await node.server.serve(link)

        barn.train = serve
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            for _ in range(3):
                await made.compute(FORWARD, b"abc")
            assert len(links) == 1

        await asyncio.sleep(1)
        with pytest.raises(LinkLost):
            await links[0].receive()

    run(scenario)


def test_a_link_that_was_closed_meanwhile_is_replaced(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            await made.compute(FORWARD, b"abc")
            await asyncio.sleep(server.IDLE_S + 5)

            assert await made.compute(FORWARD, b"abc") == b"cba"

    run(scenario)


def test_a_few_batches_go_to_a_node_at_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        served = 0
        most = 0

        async def serve(link: SecureLink) -> None:
            nonlocal served, most
            served += 1
            most = max(most, served)
            await node.server.serve(link)
            served -= 1

        barn.train, node.worker.takes_s = serve, 10.0
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            results = await asyncio.gather(*(made.compute(FORWARD, b"abc") for _ in range(5)))

        assert (results, most) == ([b"cba"] * 5, relay.LINKS_OF_NODE)

    run(scenario)


def test_a_slow_batch_is_awaited(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        node.worker.takes_s = 5 * transfer.IDLE_S
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            assert await made.compute(FORWARD, b"abc") == b"cba"

    run(scenario)


def test_a_node_that_hangs_is_given_up(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async def hang(link: SecureLink) -> None:
            await asyncio.sleep(10 * transfer.IDLE_S)
            await link.close()

        barn.train = hang
        made = relay_of(attic, barn.me, server=node.server)
        with pytest.raises(LinkLost, match="sent nothing for 30 s"):
            await made.compute(FORWARD, b"abc")

    run(scenario)


def test_a_node_that_is_lost_loses_the_batch(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        node.worker.takes_s = 10.0
        made = relay_of(attic, barn.me, server=node.server)
        computing = asyncio.ensure_future(made.compute(FORWARD, b"abc"))
        await asyncio.sleep(5)
        await barn.close()

        with pytest.raises(LinkLost):
            await computing
        with pytest.raises(LinkLost):
            await made.compute(FORWARD, b"abc")

    run(scenario)


@pytest.mark.parametrize(
    ("error", "expected"), [(PeerFault("Batch of 9"), ModelError), (MemoryError(), Busy)]
)
def test_a_refusal_says_whether_to_try_again(
    run: Callable[[Scenario], None], error: Exception, expected: type[Exception]
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            await made.compute(FORWARD, b"abc")
            node.loaded[0].error = error
            with pytest.raises(expected):
                await made.compute(FORWARD, b"abc")
            node.loaded[0].error = None
            assert await made.compute(FORWARD, b"abc") == b"cba"

    run(scenario)


@pytest.mark.parametrize(
    "reply",
    [
        [StartPass(MODEL, Span(0, 4), Direction.FORWARD, 1)],
        [TensorBytes(b"cba")],
        [PassDone(3), TensorBytes(b"cb")],
        [PassDone(3), TensorBytes(b"cbac")],
        [PassDone(3), PassDone(3)],
    ],
)
def test_a_node_that_misbehaves_is_a_fault(
    run: Callable[[Scenario], None], reply: list[StartPass | TensorBytes | PassDone]
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async def serve(link: SecureLink) -> None:
            for each in reply:
                await link.send(encode(each))
            await asyncio.sleep(5)
            await link.close()

        barn.train = serve
        made = relay_of(attic, barn.me, server=node.server)
        with pytest.raises(PeerFault):
            await made.compute(FORWARD, b"abc")
        assert not made._idle[barn.me]

    run(scenario)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModelError("/secret is missing"), "does not have the weights"),
        (OutOfMemory("/secret is full"), "not enough memory"),
        (Busy("Not kept any more"), "Not kept any more"),
    ],
)
def test_a_refusal_that_may_pass_names_the_node_and_no_path_of_it(
    run: Callable[[Scenario], None], error: Exception, text: str
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            await made.compute(FORWARD, b"abc")
            node.loaded[0].error = error

            with pytest.raises(Busy, match=f"Node {short(barn.me)}: .*{text}") as caught:
                await made.compute(FORWARD, b"abc")
            assert "secret" not in str(caught.value)

    run(scenario)


def test_a_cancelled_batch_closes_its_link(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            node.worker.takes_s = 20.0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.0):
                    await made.compute(FORWARD, b"abc")
            assert not made._idle[barn.me]
            node.worker.takes_s = 0.0

            assert await made.compute(FORWARD, b"def") == b"fed"

    run(scenario)


def test_a_third_batch_to_a_node_waits_for_a_link(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async with running(relay_of(attic, barn.me, server=node.server)) as made:
            await made.compute(FORWARD, b"abc")
            node.worker.takes_s = 10.0
            tasks = [asyncio.ensure_future(made.compute(FORWARD, b"abc")) for _ in range(3)]
            await asyncio.sleep(5)
            assert len(node.server._links) == relay.LINKS_OF_NODE
            assert made._turns[barn.me].locked()

            assert await asyncio.gather(*tasks) == [b"cba"] * 3

    run(scenario)


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemory("full"), ModelError("missing")])
def test_own_layers_refuse_for_now_what_those_of_others_do(error: Exception) -> None:
    async def scenario() -> None:
        node, me = TrainingNode(), NodeId(b"m" * 32)

        async def plan_of(_: object) -> Any:
            return ring(me)

        dial: Any = None
        made = TrainingRelay(me, plan_of, dial, node.server)
        await made.compute(FORWARD, b"abc")
        node.loaded[0].error = error
        with pytest.raises(Busy):
            await made.compute(FORWARD, b"abc")

    run_virtual(scenario())


def test_a_link_whose_batch_ends_after_the_relay_is_closed(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        made = relay_of(attic, barn.me, server=node.server)
        task = asyncio.ensure_future(made.run())
        node.worker.takes_s = 5.0
        computing = asyncio.ensure_future(made.compute(FORWARD, b"abc"))
        await asyncio.sleep(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(computing, return_exceptions=True)
        await asyncio.sleep(1)

        assert not made._idle[barn.me]
        assert not node.server._links

    run(scenario)
