"""Turns of the askers of a ring with the threads that read long prompts and compile grammars.

Both take seconds, before a request waits for admission, and a thread serves in order of arrival:
without turns one asker could fill it for minutes. Askers take turns as they do for generations, see
`meshllm.protocol.kv_cache.admission`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from meshllm.errors import Busy
from meshllm.names import SESSION_ID_BYTES, SessionId
from meshllm.node.admission_queue import AdmissionQueue
from meshllm.protocol.kv_cache.admission import QUANTUM, Admission, queue_key_of
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_scope import PrefixScope

CHARS = 1024
"""Characters that count as a token of `Admission`: a turn is half a megabyte, about 0.5 s."""


class TextTurns:
    """Turns with the threads of one model; each has as many at a time as it has threads."""

    def __init__(self) -> None:
        self._texts = AdmissionQueue(Admission(KvBudget([]), most=1))
        self._grammars = AdmissionQueue(Admission(KvBudget([]), most=2))

    def text(self, scope: PrefixScope, chars: int) -> AbstractAsyncContextManager[None]:
        """Wait for a turn to read a long text; hold it inside the context; raise `Busy`."""
        return _turn(self._texts, scope, 1 + chars // CHARS, "long prompts to be read")

    def grammar(self, scope: PrefixScope) -> AbstractAsyncContextManager[None]:
        """Wait for a turn to compile a grammar; hold it inside the context; raise `Busy`."""
        return _turn(self._grammars, scope, QUANTUM, "schemas to be compiled")


@asynccontextmanager
async def _turn(
    queue: AdmissionQueue, scope: PrefixScope, tokens: int, what: str
) -> AsyncIterator[None]:
    session, (requester, name) = SessionId(os.urandom(SESSION_ID_BYTES)), queue_key_of(scope)
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(queue.admitted(session, tokens, requester, name))
        except Busy as error:
            raise Busy(f"Too many requests wait for {what}", hint=error.hint) from None
        yield
