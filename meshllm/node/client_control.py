"""A client as its API server sees it: models, and the little that it knows of the mesh."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from meshllm import __version__
from meshllm.errors import MeshError, UserError
from meshllm.names import show
from meshllm.node.client import MeshClient
from meshllm.request import Event, Request
from meshllm.status import (
    Measured,
    MeshStatus,
    ModelStatus,
    PlannedRing,
    PlanTerms,
    RingState,
    RingStatus,
    SessionCounts,
)

GLANCE_S = 2.0  # s that a status waits for the models; a page asks again every second


@dataclass(slots=True)
class ClientControl:
    """The implementation of `ApiServerPort` over a client."""

    client: MeshClient
    _since: float = field(default_factory=time.monotonic)

    async def models(self) -> Sequence[ModelStatus]:
        """List the models of the mesh; raise `TimedOut` if no node tells them."""
        return await self.client.models()

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of a request; see `MeshClient.generate`."""
        return self.client.generate(request)

    async def status(self) -> MeshStatus:
        """Return what a client knows: models, and its own requests; no nodes, layers or plans."""
        models, reason = await self._known()
        providers = tuple(each for each in models if each.providers)
        of_rings = tuple(each for each in models if not each.providers)
        return MeshStatus(
            mesh=self.client.mesh.hex(),
            node=show(self.client.me),
            name="",
            version=__version__,
            model=of_rings[0] if of_rings else None,
            ring=self._ring(models, reason),
            nodes=(),
            sessions=self._sessions(),
            listening=(),
            networks=(),
            since_s=time.monotonic() - self._since,
            provided=providers,
            models=of_rings,
            is_client=True,
        )

    async def try_plan(self, terms: PlanTerms) -> PlannedRing:
        """Raise `UserError`: a client knows nothing to plan with."""
        _ = terms
        raise UserError(
            "This API server runs on a client, which knows no nodes to plan with",
            hint="use the page of a node, or `meshllm ring plan` there",
        )

    async def revoke(self, tags: Sequence[bytes]) -> None:
        """Do nothing: the keys of this API server are valid at no other one."""

    async def _known(self) -> tuple[Sequence[ModelStatus], str]:
        """Return the models, and why there are none."""
        try:
            async with asyncio.timeout(GLANCE_S):
                return await self.client.models(), ""
        except TimeoutError:
            return (), self.client.reason()
        except MeshError as error:
            return (), str(error)

    def _ring(self, models: Sequence[ModelStatus], reason: str) -> RingStatus:
        epoch = max((each.epoch for each in models), default=0)
        serves = any(each.is_served for each in models)
        waiting = RingState.FORMING if models else RingState.WAITING
        return RingStatus(
            state=RingState.SERVING if serves else waiting,
            reason=reason or ("" if serves else "the mesh serves no model yet"),
            epoch=epoch,
            digest="",
            policy="",
            entry=None,
            stages=(),
            predicted=None,
            measured=self._measured(),
            advice="",
        )

    def _measured(self) -> Measured | None:
        counts = self.client.router.counts
        if (last := counts.last) is None or not last.ms_per_token:
            return None
        return Measured(last.ms_per_token, last.ttft_ms, counts.last_tokens, hops=())

    def _sessions(self) -> SessionCounts:
        counts, waiting = self.client.router.counts, self.client.waiting
        return SessionCounts(
            counts.active + waiting,
            waiting,
            counts.served,
            counts.failed,
            counts.tokens,
            counts.loss_counts(),
        )
