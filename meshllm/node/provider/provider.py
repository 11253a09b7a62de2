"""The models of an engine as offers of this node, as long as the engine answers.

Theory of operation
-------------------
An engine that refuses a look at its models, or a connection, serves none: its offers end at once.
One that sends nothing may be busy, as with a long prompt, and requests wait for it: its offers end
after `SILENT_S`, of which a look counts as at most one that times out: in a longer one this process
was stopped, and what the engine sent meanwhile was not read. While the process of an own engine
does not run, nothing is asked or offered: what answers at its port is another program.

What keeps an engine from serving is known to the whole mesh, and changes rarely: one that ended
counts as such until it lists models again, however often it is started meanwhile.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from meshllm.errors import LinkLost, MeshError, TimedOut
from meshllm.node.provider.engine import LIST_S, EngineClient
from meshllm.node.provider.process import EngineProcess
from meshllm.node.timer import loop_time
from meshllm.protocol.membership.records import ModelOffer
from meshllm.request import Event, Request

POLL_S = 2.0  # s between two looks at an engine
STARTING = "its engine is starting"
NO_MODELS = "its engine lists no models"
NO_ANSWER = "its engine does not answer"
SILENT_S = 30.0  # s after which an engine that sends nothing does not count as busy: four looks

logger = logging.getLogger(__name__)


class Provider:
    """An engine, watched; a `Backend` for the models that it lists."""

    def __init__(self, engine: EngineClient, process: EngineProcess | None = None) -> None:
        """Provide the models of an engine, and run its process if it is this node's own."""
        self.engine = engine
        self.offers: tuple[ModelOffer, ...] = ()
        """Of the engine while it answers."""
        self.trouble = STARTING
        """Why nothing is offered; empty while something is."""
        self.active = 0
        """Requests in progress."""
        self._process = process
        self._error = ""
        """Of the latest look; empty if the engine answered."""
        self._ended = ""
        """How its process ended; empty if it has listed models since."""
        self._looked_at = 0.0  # when a look ended last, or the engine sent something
        self._silent_s = math.inf  # since it sent something
        self._is_suspect = asyncio.Event()
        """Its process ended or a request failed: look at once."""

    def has(self, model: str) -> bool:
        """Return whether a model is offered now."""
        return any(each.model == model for each in self.offers)

    def kill(self) -> None:
        """Kill the process of the engine, if it is this node's own, with its children."""
        if self._process:
            self._process.kill()

    async def run(self, changed: Callable[[], None]) -> None:
        """Watch the engine until cancelled; call ``changed`` when the offers or trouble change."""
        async with asyncio.TaskGroup() as group:
            if self._process:
                group.create_task(self._process.run(self._has_ended))
            while True:
                self._is_suspect.clear()
                offers = await self._look()
                trouble = "" if offers else self._why_nothing()
                if (offers, trouble) != (self.offers, self.trouble):
                    self.offers, self.trouble = offers, trouble
                    changed()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._is_suspect.wait()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request, see `Backend`.

        Raises:
            LinkLost: the model is not offered any more.
        """
        if not self.has(request.model):
            raise LinkLost(f"The engine does not serve `{request.model[:100]}` any more")
        self.active += 1
        try:
            async with aclosing(self.engine.generate(request)) as events:
                async for event in events:
                    self._heard()
                    yield event
        except LinkLost:
            self._is_suspect.set()
            raise
        finally:
            self.active -= 1

    async def _look(self) -> tuple[ModelOffer, ...]:
        if self._process:
            if self._process.pid is None:
                return ()
            self.engine.url = self._process.url
        try:
            offers = await self.engine.models()
        except MeshError as error:
            # A command that was just started is expected not to answer yet.
            is_starting = self._process is not None and self._silent_s == math.inf
            if str(error) != self._error:
                logger.log(logging.INFO if is_starting else logging.WARNING, "%s", error)
            self._error = str(error)
            is_busy = isinstance(error, TimedOut) and self._is_silent_for() < SILENT_S
            return self.offers if is_busy else ()
        if self._error and self._silent_s < math.inf:
            logger.warning("the engine answers again")
        self._heard()
        self._error = ""
        if offers and (self._process is None or self._process.pid is not None):
            self._ended = ""
        return offers

    def _has_ended(self, how: str) -> None:
        self._ended = how
        self._is_suspect.set()

    def _why_nothing(self) -> str:
        if self._ended:
            return f"its engine {self._ended}"
        if self._process is not None and self._silent_s == math.inf:
            return STARTING
        return NO_ANSWER if self._error else NO_MODELS

    def _heard(self) -> None:
        self._looked_at, self._silent_s = loop_time(), 0.0

    def _is_silent_for(self) -> float:
        """Return for how many seconds the engine has sent nothing, after another such look."""
        now = loop_time()
        self._silent_s += min(now - self._looked_at, LIST_S + POLL_S)
        self._looked_at = now
        return self._silent_s
