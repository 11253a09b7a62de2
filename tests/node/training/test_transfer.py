"""Messages and tensors over a link, each within a time."""

import asyncio
from collections.abc import Callable

import pytest

from meshllm.errors import LinkLost, PeerFault
from meshllm.node.net.secure import SecureLink
from meshllm.node.training import transfer
from meshllm.protocol.training.codec import (
    TENSOR_CHUNK_BYTES,
    PassDone,
    StillComputing,
    TensorBytes,
    encode,
)
from tests.builders.mesh_members import MeshMember
from tests.builders.training import TrainingNode
from tests.node.training.conftest import Scenario


async def both(attic: MeshMember, barn: MeshMember) -> tuple[SecureLink, SecureLink]:
    """Open a link; return its two ends."""
    accepted = asyncio.Queue[SecureLink]()
    done = asyncio.Event()

    async def serve(link: SecureLink) -> None:
        await accepted.put(link)
        await done.wait()

    barn.train = serve
    link = await attic.links.dial_training(barn.me)
    other = await accepted.get()
    done.set()
    return link, other


@pytest.mark.parametrize("size", [1, TENSOR_CHUNK_BYTES, 2 * TENSOR_CHUNK_BYTES + 5])
def test_tensors_arrive_whole(run: Callable[[Scenario], None], size: int) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, _: TrainingNode) -> None:
        link, other = await both(attic, barn)
        data = bytes(size - 1) + b"x"

        sending = asyncio.ensure_future(transfer.send_tensors(link, data))
        assert await transfer.receive_tensors(other, size) == data
        await sending
        await link.close()

    run(scenario)


@pytest.mark.parametrize("message", [StillComputing(), PassDone(1), TensorBytes(b"xy")])
def test_something_else_than_the_next_bytes_is_a_fault(
    run: Callable[[Scenario], None], message: StillComputing | PassDone | TensorBytes
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, _: TrainingNode) -> None:
        link, other = await both(attic, barn)
        await transfer.send(link, message)
        with pytest.raises(PeerFault, match="instead of the next 3 bytes"):
            await transfer.receive_tensors(other, 3)
        await link.close()

    run(scenario)


def test_a_message_of_a_later_version_is_skipped(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, _: TrainingNode) -> None:
        link, other = await both(attic, barn)
        await link.send([b"\x09"])
        await link.send(encode(PassDone(1)))

        assert await transfer.receive(other) == PassDone(1)
        await link.close()

    run(scenario)


def test_a_peer_that_neither_sends_nor_reads_is_given_up(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, _: TrainingNode) -> None:
        link, _other = await both(attic, barn)
        with pytest.raises(LinkLost, match="sent nothing for 7 s"):
            await transfer.receive(link, 7.0)
        with pytest.raises(LinkLost, match="read nothing for 30 s"):
            await transfer.send_tensors(link, bytes(1 << 28))
        await link.close()

    run(scenario)
