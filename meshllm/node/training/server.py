"""Computes batches for training through the layers of this node, one at a time, when it is idle.

What serves comes first: a batch begins when no step of an answer waits, and between two layers
those that wait are computed. Nothing is kept for a client but the loaded layers, for a while.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshllm.errors import Busy, LinkLost, MeshError, ModelError, OutOfMemory, PeerFault
from meshllm.names import Digest, NodeId, Span, short
from meshllm.node.net.secure import SecureLink
from meshllm.node.timer import CallLater, loop_time
from meshllm.node.training.transfer import receive, receive_tensors, send, send_tensors
from meshllm.protocol.training.codec import (
    MAX_BATCH_BYTES,
    STILL_S,
    Direction,
    PassDone,
    PassRefused,
    StartPass,
    StillComputing,
)

MAX_LINKS = 8  # that are served at once; each has one batch at a time
MAX_LINKS_OF_NODE = 3  # a node uses two; an earlier one may not be known to be lost yet
MAX_SPANS = 2  # that are loaded: after a change of the plan, batches for both parts may come
IDLE_S = 60.0  # s without a batch after which a link is closed
KEEP_S = 60.0  # s without a batch after which the layers are released
MEMORY_PART = 4  # the part of the free memory, as a divisor, that the tensors of a batch may take

if TYPE_CHECKING:  # they import torch, which a provider does not need
    from meshllm.model.training.frozen_span import FrozenSpan
    from meshllm.node.compute.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerPass:
    """What a batch is for."""

    model: Digest
    """blake3 of the configuration of the model."""
    span: Span
    """The layers to go through."""
    direction: Direction


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model with whose layers this node computes batches."""

    worker: "Worker"
    load: "Callable[[Span], FrozenSpan]"
    """Runs on the compute thread."""


class TrainingServer:
    """Computes batches through the layers of the models whose weights are here."""

    def __init__(self, call_later: CallLater) -> None:
        self._call_later = call_later
        self._models: dict[Digest, FrozenModel] = {}
        self._spans: OrderedDict[tuple[Digest, Span], FrozenSpan] = OrderedDict()
        self._turn = asyncio.Lock()
        self._last_used = 0.0  # loop time
        self._is_releasing = False  # whether the layers are to be released once unused
        self._links: list[NodeId] = []

    def offer(self, digest: Digest, model: FrozenModel) -> None:
        """Compute batches through layers of a model from now on."""
        self.withdraw(digest)
        self._models[digest] = model

    def withdraw(self, digest: Digest) -> None:
        """Compute no more through the layers of a model, and release them."""
        self._models.pop(digest, None)
        for each in [each for each in self._spans if each[0] == digest]:
            del self._spans[each]

    async def serve(self, link: SecureLink) -> None:
        """Answer the batches of a node until it closes the link or sends something invalid."""
        links = self._links
        if len(links) >= MAX_LINKS or links.count(link.peer) >= MAX_LINKS_OF_NODE:
            await link.close()
            return
        links.append(link.peer)
        try:
            while True:
                message = await receive(link, IDLE_S)
                if not isinstance(message, StartPass):
                    raise PeerFault(f"{type(message).__name__} instead of a batch")
                await self._answer(link, message)
        except MeshError as error:
            logger.debug("link for training to node %s ended: %s", short(link.peer), error)
        finally:
            links.remove(link.peer)
            await link.close()

    async def _answer(self, link: SecureLink, asked: StartPass) -> None:
        from meshllm.model.shape import free_memory

        if asked.size > free_memory() // MEMORY_PART:
            raise LinkLost("There is no memory for a batch")
        data = await receive_tensors(link, asked.size)
        computing = asyncio.ensure_future(
            self.compute(LayerPass(asked.model, asked.span, asked.direction), data)
        )
        try:
            while not (await asyncio.wait([computing], timeout=STILL_S))[0]:
                await send(link, StillComputing())
            result = computing.result()
        except MeshError as error:
            logger.info("cannot compute a batch of node %s: %s", short(link.peer), error)
            await send(link, refusal_of(error))
        else:
            await send(link, PassDone(len(result)))
            await send_tensors(link, result)
        finally:
            computing.cancel()

    async def compute(self, asked: LayerPass, data: bytes) -> bytes:
        """Compute a batch through layers; return what comes out, see `model.training.batch`.

        Raises:
            PeerFault: the batch is invalid.
            OutOfMemory: it does not fit into free memory.
            ModelError: this node does not have the weights of the layers.
        """
        async with self._turn:
            try:
                layers, run = await self._load(asked)
                result = await run(0, _PASSES[asked.direction], layers, data)
            except (MemoryError, RuntimeError) as error:
                from meshllm.model.device import is_out_of_memory

                if not is_out_of_memory(error):
                    raise
                raise OutOfMemory("The batch does not fit into the memory of a node") from error
            finally:
                self._last_used = loop_time()
                if not self._is_releasing:
                    self._is_releasing = True
                    self._call_later(KEEP_S, self._release_unused)
        if len(result) > MAX_BATCH_BYTES:
            raise PeerFault(f"What comes out has {len(result)} bytes: send fewer tokens")
        return result

    async def _load(self, asked: LayerPass) -> "tuple[FrozenSpan, Callable[..., Awaitable[bytes]]]":
        """Return layers, loaded if they are not yet, and what runs a pass through them."""
        if (model := self._models.get(asked.model)) is None:
            raise ModelError("This node does not have the model")
        key, run = (asked.model, asked.span), model.worker.run_when_idle
        if (layers := self._spans.get(key)) is None:
            layers = await run(0, model.load, asked.span)
            if self._models.get(asked.model) is not model:
                raise Busy("This node does not hold the model any more")
            self._spans[key] = layers
            if len(self._spans) > MAX_SPANS:
                self._spans.popitem(last=False)
        self._spans.move_to_end(key)
        return layers, run

    def _release_unused(self) -> None:
        unused_s = 0.0 if self._turn.locked() else loop_time() - self._last_used
        self._is_releasing = unused_s < KEEP_S
        if self._is_releasing:
            self._call_later(KEEP_S - unused_s, self._release_unused)
            return
        self._spans.clear()
        for model in self._models.values():
            model.worker.reclaim_later()


_PASSES: "Mapping[Direction, Callable[[FrozenSpan, bytes], bytes]]" = {
    Direction.FORWARD: lambda layers, data: layers.forward(data),
    Direction.FORWARD_KEEPING: lambda layers, data: layers.forward(data, keeps=True),
    Direction.BACKWARD: lambda layers, data: layers.backward(data),
}


def refusal_of(error: MeshError) -> PassRefused:
    """Return what the sender hears of an error: no path, and whether its batch is at fault."""
    if isinstance(error, PeerFault):
        return PassRefused(str(error), is_final=True)
    if isinstance(error, OutOfMemory):
        return PassRefused("not enough memory: try fewer tokens", is_final=False)
    if isinstance(error, Busy):
        return PassRefused(str(error), is_final=False)
    return PassRefused("the node does not have the weights of the layers", is_final=False)
