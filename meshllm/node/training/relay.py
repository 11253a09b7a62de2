"""Sends the batches of this node's owner to the nodes with the layers, and returns what comes out.

A batch goes through the layers of one node; the caller sends what came out to the next. It keeps
what it sent, so that a lost node costs one repetition: a pass is a function of its batch alone.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

from meshllm.errors import Busy, LinkLost, MeshError, ModelError, PeerFault, TimedOut
from meshllm.names import Digest, NodeId, Span, short
from meshllm.node.net.secure import SecureLink
from meshllm.node.training.server import LayerPass, TrainingServer, refusal_of
from meshllm.node.training.transfer import receive, receive_tensors, send, send_tensors
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.training.codec import (
    PassDone,
    PassRefused,
    StartPass,
    StillComputing,
)
from meshllm.protocol.training.route import holder

LINKS_OF_NODE = 2
"""Links to one node: a batch arrives while another is computed."""
WAIT_S = 60.0
"""s to wait for a ring that holds the model."""

logger = logging.getLogger(__name__)


class TrainingRelay:
    """Knows which node has which layers, and keeps links to them."""

    def __init__(
        self,
        me: NodeId,
        plan_of: Callable[[Digest], Awaitable[Plan]],
        dial: Callable[[NodeId], Awaitable[SecureLink]],
        server: TrainingServer,
    ) -> None:
        """``plan_of`` waits for a ring with a model, ``dial`` opens a link for training."""
        self._me = me
        self._plan_of = plan_of
        self._dial = dial
        self._server = server
        self._is_closed = False
        self._idle = defaultdict[NodeId, list[SecureLink]](list)
        self._turns = defaultdict[NodeId, asyncio.Semaphore](
            lambda: asyncio.Semaphore(LINKS_OF_NODE)
        )

    async def run(self) -> None:
        """Close the links once cancelled."""
        try:
            await asyncio.Event().wait()  # never set: wait until cancelled
        finally:
            self._is_closed = True
            links = [each for links in self._idle.values() for each in links]
            self._idle.clear()
            await asyncio.gather(*(each.close() for each in links))

    async def spans(self, model: Digest) -> list[Span]:
        """Wait for a ring with a model; return its spans in order.

        Raises:
            TimedOut: there is none.
            ModelMissing: the mesh does not serve the model.
        """
        return [stage.span for stage in (await self._plan(model)).stages]

    async def compute(self, asked: LayerPass, data: bytes) -> bytes:
        """Send a batch through layers that one node has; return what comes out.

        Raises:
            TimedOut: no ring has the model.
            Busy: the ring is cut otherwise now, see `spans`, or the node has no memory now.
            LinkLost: the node is lost; repeat it.
            ModelError: the mesh does not serve the model, or the batch is invalid.
            PeerFault: a peer misbehaves.
        """
        node = holder(await self._plan(asked.model), asked.span)
        if node is None:
            raise Busy(f"No node holds all layers of `{asked.span}` now", hint="try again")
        if node == self._me:
            try:
                return await self._server.compute(asked, data)
            except MeshError as error:
                logger.info("cannot compute a batch: %s", error)
                raise _refused("This node", refusal_of(error)) from None
        start = StartPass(asked.model, asked.span, asked.direction, len(data))
        async with self._turns[node]:
            return await self._compute_at(node, start, data)

    async def _plan(self, model: Digest) -> Plan:
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._plan_of(model)
        except TimeoutError:
            raise TimedOut("No ring holds the layers of the model", hint="try again") from None

    async def _compute_at(self, node: NodeId, start: StartPass, data: bytes) -> bytes:
        while self._idle[node]:
            try:
                return await self._exchange(self._idle[node].pop(), start, data)
            except LinkLost:  # it was closed meanwhile; nothing has come out
                continue
        return await self._exchange(await self._dial(node), start, data)

    async def _exchange(self, link: SecureLink, start: StartPass, data: bytes) -> bytes:
        is_reusable = False
        try:
            await send(link, start)
            await send_tensors(link, data)
            while isinstance(message := await receive(link), StillComputing):
                pass
            match message:
                case PassDone(size):
                    result = await receive_tensors(link, size)
                    is_reusable = True
                    return result
                case PassRefused() as refusal:
                    is_reusable = True
                    raise _refused(f"Node {short(link.peer)}", refusal)
                case other:
                    raise PeerFault(f"{type(other).__name__} instead of what came out of a batch")
        finally:
            if is_reusable and not self._is_closed:
                self._idle[link.peer].append(link)
            else:
                await link.close()


def _refused(who: str, refusal: PassRefused) -> MeshError:
    text = f"{who}: {refusal.reason}"
    return ModelError(text) if refusal.is_final else Busy(text)
