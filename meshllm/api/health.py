"""`GET /health`: whether this server can answer, for load balancers and supervisors."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.failure import RETRY_S
from meshllm.api.port import ModelPort
from meshllm.errors import MeshError

KEPT_S = 1.0
"""For how long a result is kept: who asks needs no key, and a client's node asks its mesh."""
PATIENCE_S = 2.0
"""For how long the node may look for models; a client's node waits longer for a mesh."""


class Health:
    """Responds with 200 while a model is served, else with 503."""

    def __init__(self, node: ModelPort) -> None:
        self._node = node
        self._lock = asyncio.Lock()
        self._serves = False
        self._until = 0.0

    def route(self) -> Route:
        """Return the route, which needs no key and tells nothing else."""
        return Route("/health", self._respond)

    async def _respond(self, _: Request) -> Response:
        async with self._lock:  # one question at a time
            loop = asyncio.get_running_loop()
            if loop.time() >= self._until:
                self._serves = await self._can_answer()
                self._until = loop.time() + KEPT_S
        if self._serves:
            return JSONResponse({"status": "ok"})
        headers = {"retry-after": str(RETRY_S)}
        return JSONResponse({"status": "no model is served"}, 503, headers)

    async def _can_answer(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return any(each.is_served for each in await self._node.models())
        except (MeshError, TimeoutError):  # such as of a client that does not reach its mesh
            return False
