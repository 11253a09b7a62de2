"""Sends the files of models to other nodes of the mesh, a few at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from meshllm.errors import MeshError, ModelError, PeerFault
from meshllm.model.files.parts import ModelParts, PartFile
from meshllm.names import Digest
from meshllm.node.net.secure import SecureLink
from meshllm.node.offloop import OffLoop
from meshllm.protocol.trust.identity import short
from meshllm.protocol.weights.codec import (
    CHUNK_BYTES,
    FileChunk,
    FileRefused,
    FileSize,
    WantFile,
    decode,
    encode,
)

MAX_LINKS = 8  # nodes that are served at once; each link sends one file at a time
IDLE_S = 60.0  # s without a request after which a link is closed

logger = logging.getLogger(__name__)


class WeightServer:
    """Sends the files of the models that this node has."""

    def __init__(self, off_loop: OffLoop) -> None:
        self._off_loop = off_loop
        self._models: dict[Digest, Callable[[], Awaitable[ModelParts]]] = {}
        self._opened: dict[Digest, ModelParts] = {}
        self._links = 0

    def offer(self, model: Digest, parts: Callable[[], Awaitable[ModelParts]]) -> None:
        """Send the parts of a model from now on; their headers are read when they are wanted."""
        self._models[model] = parts

    async def serve(self, link: SecureLink) -> None:
        """Answer the requests of a node until it closes the link or sends something invalid."""
        if self._links >= MAX_LINKS:
            await link.close()
            return
        self._links += 1
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    _, data = await link.receive()
                message = decode(data)
                if not isinstance(message, WantFile):
                    raise PeerFault(f"{type(message).__name__} instead of a request for weights")
                await self._answer(link, message)
        except (MeshError, TimeoutError) as error:
            logger.debug("link for weights to node %s ended: %s", short(link.peer), error)
        finally:
            self._links -= 1
            await link.close()

    async def _answer(self, link: SecureLink, want: WantFile) -> None:
        try:
            file = await self._file(want)
            await link.send(encode(FileSize(file.size)))
            offset = want.offset
            while offset < file.size:
                data = await self._off_loop(file.read, offset, CHUNK_BYTES)
                await link.send(encode(FileChunk(data)))
                offset += len(data)
        except ModelError as error:  # not here, or changed on disk: names no path to the peer
            logger.info("cannot send `%s` to node %s: %s", want.name, short(link.peer), error)
            await link.send(encode(FileRefused("this node does not have the file")))

    async def _file(self, want: WantFile) -> PartFile:
        make = self._models.get(want.model)
        if make is None:
            raise ModelError("This node does not have the model")
        if want.model not in self._opened:
            self._opened[want.model] = await make()
        return await self._off_loop(self._opened[want.model].open, want.name)
