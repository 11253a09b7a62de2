"""Waiting for what `meshllm.protocol.kv_cache.admission` admits: one waiter for each request."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from meshllm.errors import MeshError
from meshllm.names import SessionId
from meshllm.node.timer import loop_time
from meshllm.protocol.kv_cache.admission import Admission, Requester


class AdmissionQueue:
    """Drives one `Admission`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._waiting: dict[SessionId, asyncio.Future[None]] = {}
        self._growing: dict[SessionId, Callable[[], None]] = {}

    @asynccontextmanager
    async def admitted(
        self,
        session: SessionId,
        tokens: int,
        requester: Requester,
        name: str = "",
        *,
        answer: int = 0,
    ) -> AsyncIterator[None]:
        """Wait for admission, see `Admission.ask`; hold it inside the context.

        Raises:
            ContextTooLong: this many tokens would not fit on an empty ring.
            Busy: the queue is full.
            MeshError: the error of `end`.
        """
        waiter = self._waiting[session] = asyncio.get_running_loop().create_future()
        try:
            now = loop_time()
            self._let_in(self._admission.ask(session, tokens, now, requester, name, answer=answer))
            await waiter
            yield
        finally:
            self._waiting.pop(session, None)
            self._growing.pop(session, None)
            self._let_in(self._admission.leave(session, loop_time()))

    def grow(self, session: SessionId, tokens: int, grown: Callable[[], None]) -> None:
        """Call ``grown`` once there is room for this many tokens of a session that is admitted.

        See `Admission.grow`.
        """
        self._growing[session] = grown
        self._let_in(self._admission.grow(session, tokens, loop_time()))

    def end_of(self, session: SessionId) -> None:
        """Note that a session computes nothing more, see `Admission.end`."""
        self._growing.pop(session, None)
        self._let_in(self._admission.end(session, loop_time()))

    @property
    def is_idle(self) -> bool:
        """Whether it may be forgotten, see `Admission.is_idle`."""
        return self._admission.is_idle(loop_time())

    def resize(self, totals: Sequence[int]) -> bool:
        """Give each rank this many bytes, if what runs and waits fits; return whether it does."""
        admitted = self._admission.resize(totals, loop_time())
        if admitted is None:
            return False
        self._let_in(admitted)
        return True

    def _let_in(self, sessions: list[SessionId]) -> None:
        for each in sessions:
            if grown := self._growing.pop(each, None):
                grown()
                continue
            waiter = self._waiting.pop(each)
            if not waiter.done():  # else it was cancelled and leaves by itself
                waiter.set_result(None)

    def end(self, error: MeshError) -> None:
        """End all that wait with an error."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
