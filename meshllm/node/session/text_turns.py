"""Turns of the askers of a ring with the threads that read long prompts and compile grammars.

Both take seconds, before a request waits for admission, and a thread serves in order of arrival:
without turns one asker could fill it for minutes. Askers take turns as they do for generations, see
`meshllm.protocol.kv_cache.admission`.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from meshllm.errors import Busy
from meshllm.names import SESSION_ID_BYTES, SessionId
from meshllm.node.admission_queue import AdmissionQueue
from meshllm.protocol.kv_cache.admission import QUANTUM, Admission, turn_of
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_scope import PrefixScope

CHARS = 1024
"""Characters that count as a token of `Admission`: a turn is half a megabyte, half a second."""


class TextTurns:
    """Turns with the threads of one model; each has as many at a time as it has threads."""

    def __init__(self) -> None:
        self._texts = AdmissionQueue(Admission(KvBudget([]), most=1))
        self._grammars = AdmissionQueue(Admission(KvBudget([]), most=2))

    @asynccontextmanager
    async def text(self, scope: PrefixScope, chars: int) -> AsyncIterator[None]:
        """Wait for a turn to read a long text; hold it inside the context; raise `Busy`."""
        asker, name = turn_of(scope)
        async with AsyncExitStack() as stack:
            turn = self._texts.admitted(_new(), 1 + chars // CHARS, asker, name)
            with _busy("long prompts to be read"):
                await stack.enter_async_context(turn)
            yield

    @asynccontextmanager
    async def grammar(self, scope: PrefixScope) -> AsyncIterator[None]:
        """Wait for a turn to compile a grammar; hold it inside the context; raise `Busy`."""
        asker, name = turn_of(scope)
        async with AsyncExitStack() as stack:
            turn = self._grammars.admitted(_new(), QUANTUM, asker, name)
            with _busy("schemas to be compiled"):
                await stack.enter_async_context(turn)
            yield


@contextmanager
def _busy(what: str) -> Iterator[None]:
    try:
        yield
    except Busy as error:
        raise Busy(f"Too many requests wait for {what}", hint=error.hint) from None


def _new() -> SessionId:
    return SessionId(os.urandom(SESSION_ID_BYTES))
