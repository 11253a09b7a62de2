"""Sends the files of models to other nodes of the mesh, a few at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from meshllm.errors import MeshError, ModelError, PeerFault
from meshllm.names import Digest, NodeId, short
from meshllm.node.event_loop import OffLoop
from meshllm.node.net.secure import SecureLink
from meshllm.protocol.weights.codec import (
    CHUNK_BYTES,
    FileChunk,
    FileRefused,
    FileSize,
    WantFile,
    WeightMessage,
    decode,
    encode,
)

MAX_LINKS = 8  # that are served at once; each link sends one file at a time
MAX_LINKS_OF_NODE = 2  # a node uses one; an earlier one may not be known to be lost yet
IDLE_S = 60.0  # s without a request, or without room for a chunk, after which a link is closed

if TYPE_CHECKING:
    from meshllm.model.files.parts import ModelParts, PartFile

logger = logging.getLogger(__name__)


class WeightServer:
    """Sends the files of the models that this node has."""

    def __init__(self, off_loop: OffLoop) -> None:
        self._off_loop = off_loop
        self._models: dict[Digest, Callable[[], Awaitable[ModelParts]]] = {}
        self._opened: dict[Digest, ModelParts] = {}
        self._links: list[NodeId] = []

    def offer(self, model: Digest, parts: "Callable[[], Awaitable[ModelParts]]") -> None:
        """Send the parts of a model from now on; their headers are read when they are wanted."""
        self._models[model] = parts
        self._opened.pop(model, None)  # other weights may have the same configuration

    async def serve(self, link: SecureLink) -> None:
        """Answer the requests of a node until it closes the link or sends something invalid."""
        links = self._links
        if len(links) >= MAX_LINKS or links.count(link.peer) >= MAX_LINKS_OF_NODE:
            await link.close()
            return
        links.append(link.peer)
        try:
            while True:
                message = await receive(link, IDLE_S)
                if not isinstance(message, WantFile):
                    raise PeerFault(f"{type(message).__name__} instead of a request for weights")
                await self._answer(link, message)
        except (MeshError, TimeoutError) as error:
            logger.debug("link for weights to node %s ended: %s", short(link.peer), error)
        finally:
            links.remove(link.peer)
            await link.close()

    async def _answer(self, link: SecureLink, want: WantFile) -> None:
        try:
            file = await self._file(want)
            await _send(link, FileSize(file.size))
            offset = want.offset
            while offset < file.size:
                data = await self._off_loop(file.read, offset, CHUNK_BYTES)
                await _send(link, FileChunk(data))
                offset += len(data)
        except ModelError as error:  # not here, or changed on disk: names no path to the peer
            logger.info("cannot send `%s` to node %s: %s", want.name, short(link.peer), error)
            await _send(link, FileRefused("this node does not have the file"))

    async def _file(self, want: WantFile) -> "PartFile":
        make = self._models.get(want.model)
        if make is None:
            raise ModelError("This node does not have the model")
        if want.model not in self._opened:
            self._opened[want.model] = await make()
        return await self._off_loop(self._opened[want.model].open, want.name)


async def receive(link: SecureLink, idle_s: float) -> WeightMessage:
    """Receive the next message of a known kind within a time, else raise `TimeoutError`."""
    async with asyncio.timeout(idle_s):
        while True:
            _, data = await link.receive()
            if (message := decode(data)) is not None:
                return message


async def _send(link: SecureLink, message: WeightMessage) -> None:
    """Send a message; raise `TimeoutError` if the other side does not read."""
    async with asyncio.timeout(IDLE_S):
        await link.send(encode(message))
