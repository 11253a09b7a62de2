"""A server of weights: what it refuses, and how many nodes it serves."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from meshllm.errors import LinkLost, ModelError
from meshllm.model.files.parts import LISTING, ModelParts, part_name
from meshllm.model.files.source import Source
from meshllm.names import Digest, NodeId
from meshllm.node.net.secure import SecureLink
from meshllm.node.weights import WeightServer, server
from meshllm.protocol.weights.codec import (
    FileChunk,
    FileRefused,
    FileSize,
    WantFile,
    decode,
    encode,
)
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from tests.builders.mesh_members import MemberNetwork
from tests.builders.weight_nodes import Nodes, Scenario, at_once


def test_a_server_refuses_what_is_not_a_request_and_closes_idle_links(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        attic, barn = await nodes.meet(network, "barn")
        for message in (FileSize(1), FileChunk(b"x"), FileRefused("x")):
            link = await attic.links.dial_weights(barn.me)
            await link.send(encode(message))
            with pytest.raises(LinkLost):
                await link.receive()
        link = await attic.links.dial_weights(barn.me)
        await asyncio.sleep(server.IDLE_S + 1)
        with pytest.raises(LinkLost):
            await link.receive()

    run(scenario)


def test_a_server_ignores_messages_of_a_later_version(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        attic, barn = await nodes.meet(network, "barn")
        link = await attic.links.dial_weights(barn.me)
        await link.send([b"\x09 of a later version"])
        await link.send(encode(WantFile(Digest(bytes(32)), "config", 0)))
        _, data = await link.receive()

        assert isinstance(decode(data), FileRefused)

    run(scenario)


def test_a_node_has_a_limit_of_links(run: Callable[[Scenario], None], nodes: Nodes) -> None:
    async def scenario(network: MemberNetwork) -> None:
        attic, barn = await nodes.meet(network, "barn")
        most = server.MAX_LINKS_OF_NODE
        links = [await attic.links.dial_weights(barn.me) for _ in range(most)]
        await asyncio.sleep(1)
        with pytest.raises(ModelError, match="cannot be fetched"):
            await nodes.describe(barn)
        for link in links:
            await link.close()
        await asyncio.sleep(1)
        assert (await nodes.describe(barn)).is_described

    run(scenario)


class StuckLink:
    """A link whose other side asks for a file, and reads nothing."""

    def __init__(self, peer: bytes, want: WantFile) -> None:
        self.peer = NodeId(peer * 32)
        self.want = want
        self.is_asked = self.is_closed = False

    async def receive(self) -> tuple[None, bytes]:
        return None, b"".join(map(bytes, encode(self.want)))

    async def send(self, _: object) -> None:
        self.is_asked = True
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


class ReadingLink(StuckLink):
    """A link whose other side is lost after the first chunk of a file."""

    data = b""

    async def send(self, message: object) -> None:
        match decode(b"".join(map(bytes, cast("Sequence[bytes]", message)))):
            case FileChunk(data):
                self.data = bytes(data)
                raise LinkLost("It has enough")


def test_a_server_gives_up_nodes_that_read_nothing_and_refuses_more_than_it_can_serve(
    nodes: Nodes,
) -> None:
    async def scenario() -> None:
        serve = nodes.sending()
        want = WantFile(nodes.charter.config_digest, LISTING, 0)
        links = [StuckLink(bytes([peer]), want) for peer in range(server.MAX_LINKS + 1)]
        serving = [asyncio.ensure_future(serve(cast("SecureLink", link))) for link in links]
        await asyncio.sleep(1)
        assert [link.is_closed for link in links] == [False] * server.MAX_LINKS + [True]
        assert [link.is_asked for link in links] == [True] * server.MAX_LINKS + [False]

        await asyncio.sleep(server.IDLE_S)
        assert all(link.is_closed for link in links)
        await asyncio.gather(*serving)

    run_virtual(scenario())


def test_a_server_sends_the_model_that_was_offered_last(nodes: Nodes, tmp_path: Path) -> None:
    want = WantFile(nodes.charter.config_digest, part_name(1), 0)

    async def scenario() -> None:
        sends = WeightServer(at_once)
        found = []
        for source in (nodes.source, tiny_model(tmp_path / "other", dtype=torch.bfloat16)):

            async def parts(source: Source = source) -> ModelParts:
                return ModelParts(source)

            sends.offer(nodes.charter.config_digest, parts)
            link = ReadingLink(b"a", want)
            await sends.serve(cast("SecureLink", link))
            found.append(link.data)
        assert found[0] != found[1]

    run_virtual(scenario())
