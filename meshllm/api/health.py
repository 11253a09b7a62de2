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
            now = asyncio.get_running_loop().time()
            if now >= self._until:
                self._serves = await self._can_answer()
                self._until = now + KEPT_S
        if self._serves:
            return JSONResponse({"status": "ok"})
        headers = {"retry-after": str(RETRY_S)}
        return JSONResponse({"status": "no model is served"}, 503, headers)

    async def _can_answer(self) -> bool:
        try:
            return bool(await self._node.models())
        except MeshError:  # such as a mesh that a client does not reach
            return False
