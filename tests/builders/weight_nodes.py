"""A node that fetches weights, and holders that send them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from meshllm.errors import LinkLost
from meshllm.model.files.manifest import config_digest, manifest
from meshllm.model.files.parts import ModelParts, PartFolder, check_parts, most_bytes, part_name
from meshllm.model.files.source import Source, open_folder
from meshllm.names import Digest, NodeId
from meshllm.node.net.secure import SecureLink
from meshllm.node.weights import WeightFetcher, WeightServer
from meshllm.protocol.weights.codec import (
    CHUNK_BYTES,
    FileChunk,
    FileSize,
    WantFile,
    WeightMessage,
    decode,
    encode,
)
from tests.builders.mesh_members import MemberNetwork, MeshMember
from tests.builders.snapshots import charter

T = TypeVar("T")
LAYERS = 6
Answer = Callable[[WantFile], Sequence[WeightMessage]]
Scenario = Callable[[MemberNetwork], Coroutine[Any, Any, None]]


async def at_once(function: Callable[..., T], /, *args: Any) -> T:
    return function(*args)


async def digest_of(folder: Path) -> Digest:
    return Digest(config_digest(open_folder("llama", folder)))


async def checked(folder: Path, weights: Mapping[str, int]) -> None:
    check_parts(open_folder("llama", folder), weights)


class Nodes:
    """A node that fetches, and holders."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.source = source
        self.charter = replace(charter(), config_digest=Digest(config_digest(source)))
        self.digests = manifest(source, folder / "cache")[:-1]
        self.sizes = most_bytes(source)
        self.folder = folder / "fetched"
        self.asked: list[tuple[NodeId, str, int]] = []

    async def meet(self, network: MemberNetwork, *names: str) -> list[MeshMember]:
        """Start the node that fetches, and linked holders that send the real model."""
        first, *rest = [await network.add(name) for name in ("attic", *names)]
        for each in rest:
            each.meet(first)
            each.send_weights = self.sending()
        await asyncio.sleep(2)
        self.fetcher = WeightFetcher(
            first.links.dial_weights, self.folder, digest_of, checked, at_once
        )
        return [first, *rest]

    def sending(self) -> Callable[[SecureLink], Awaitable[None]]:
        sends = WeightServer(at_once)

        async def parts() -> ModelParts:
            return ModelParts(self.source)

        sends.offer(self.charter.config_digest, parts)
        return sends.serve

    def scripted(self, member_node: MeshMember, answer: Answer) -> None:
        """Let a holder answer each request by a script."""

        async def serve(link: SecureLink) -> None:
            with suppress(LinkLost):
                while True:
                    _, data = await link.receive()
                    want = decode(data)
                    assert isinstance(want, WantFile)
                    self.asked.append((member_node.me, want.name, want.offset))
                    for message in answer(want):
                        await link.send(encode(message))
            await link.close()

        member_node.send_weights = serve

    def sending_slowly(self, member_node: MeshMember, most: int, pause_s: float) -> None:
        """Let a holder send the real model in small chunks, and pause before each."""

        async def serve(link: SecureLink) -> None:
            with suppress(LinkLost):
                while True:
                    _, data = await link.receive()
                    want = decode(data)
                    assert isinstance(want, WantFile)
                    self.asked.append((member_node.me, want.name, want.offset))
                    file = ModelParts(self.source).open(want.name)
                    await link.send(encode(FileSize(file.size)))
                    for at in range(want.offset, file.size, most):
                        await asyncio.sleep(pause_s)
                        await link.send(encode(FileChunk(file.read(at, min(most, file.size - at)))))
            await link.close()

        member_node.send_weights = serve

    async def describe(self, *member_nodes: MeshMember) -> PartFolder:
        await self.fetcher.describe(self.charter, [member_node.me for member_node in member_nodes])
        return self.fetcher.place(self.charter)

    async def fetch(self, parts: Sequence[int], *member_nodes: MeshMember) -> None:
        wanted = {part: self.digests[part] for part in parts}
        holders = {member_node.me: frozenset(parts) for member_node in member_nodes}
        await self.fetcher.fetch(self.charter, wanted, holders, self.sizes)

    def true(self, want: WantFile) -> list[WeightMessage]:
        """Return the right answer."""
        file = ModelParts(self.source).open(want.name)
        data = file.read(want.offset, file.size)
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        return [FileSize(file.size), *map(FileChunk, chunks)]

    @property
    def here(self) -> list[int]:
        place = self.fetcher.place(self.charter)
        return [part for part in range(LAYERS + 2) if (place.folder / part_name(part)).exists()]
