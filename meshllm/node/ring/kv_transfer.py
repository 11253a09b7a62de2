"""Hands over KV caches: a node that leaves sends them to the next owners of its layers.

Theory of operation
-------------------
The ring goes on while the next plan is prepared. Meanwhile the leaving node copies the KV caches of
its sessions, a few rows at a time between two steps, and sends them over a link of its own to each
node that takes over some of its layers. Then it looks how far the sessions have come, and sends the
rows since, until few are left. The next ring computes only these again, see
`meshllm.protocol.session.entry`. Rows of drafts, which may be taken back, are not sent.

A session whose request names the nodes that may see it is not sent: its rows reveal the prompt, the
next owner may be another node, and only the entry knows the names. Its Data tell the stages, see
`Flags.NO_HANDOVER`; a stage sends no session of which it has received no Data yet.

A session is sent only as far as that is sooner than to compute its rows again: both are estimated,
the first from the bytes that the link has taken so far, the second from the offer of the node.

Nothing depends on it: what has not arrived, or does not fit, is computed again. The receiver takes
rows only of the node that had the layers, for layers that it has loaded in advance, and as long as
it has memory that sessions do not use. Before they are used, it compares their shapes and types
with those that the model computes.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from torch import Tensor

from meshllm.errors import MeshError, ModelError, OutOfMemory, PeerFault
from meshllm.model.split.received_rows import ReceivedRows
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.wire.payload import is_finite
from meshllm.names import SessionId
from meshllm.node.compute.worker import Worker
from meshllm.node.session.wire import opened, sealed
from meshllm.node.timer import loop_time
from meshllm.protocol.kv_cache.admission import MAX_SESSIONS
from meshllm.protocol.session.blob import session_key
from meshllm.protocol.session.codec import decode, encode
from meshllm.protocol.session.messages import Buffer, DType, KvOffer, KvRows, UnknownRingMessage
from meshllm.transport.contract import Link

BLOCK_ROWS = 256
"""Rows of one message: a MiB or two of a layer of a large model, a millisecond of a copy."""
MAX_PASSES = 4
FEW_ROWS = 32
"""Rows of a session that are not worth another pass: the next ring computes them in one go."""
MAX_RECEIVED = 4 * MAX_SESSIONS
"""Sessions that one node hands over: those that run, and some that end meanwhile."""
MEASURED_BYTES = 1 << 20
"""Bytes after which the rate of a link is known well enough."""

_PLAIN = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16

logger = logging.getLogger(__name__)


class Rank(Protocol):
    """The entry or a stage, whose sessions are handed over."""

    @property
    def committed(self) -> Mapping[SessionId, int]:
        """Positions that no draft takes back, of each session that may be handed over."""

    def cache_of(self, session: SessionId) -> SessionCache | None:
        """Return the cache of a session; None once it has ended."""


class KvSender:
    """Sends the caches of a rank to one node, for some of its layers."""

    def __init__(  # noqa: PLR0913 -- what it sends, and where
        self,
        link: Link,
        offer: KvOffer,
        worker: Worker,
        rank: Rank,
        layers: Collection[int],
        next_layer: int | None,
        recompute_s: Callable[[range], float | None],
    ) -> None:
        """Send ``layers``, after the own ``offer``; and the rows that entered ``next_layer``.

        That one is the layer after the rank, if the node is going to be the rank before it.
        ``recompute_s`` returns how long it takes to recompute rows of these layers, if it is known.
        """
        self._link = link
        self._offer = offer
        self._worker = worker
        self._rank = rank
        self._layers = layers
        self._next_layer = next_layer
        self._recompute_s = recompute_s
        self._sent: dict[SessionId, int] = {}
        self._ended = set[tuple[SessionId, int]]()  # layers of which no more rows are sent
        self._bytes = 0
        self._is_begun = False
        self._begin = 0.0  # of the present `catch_up`
        self._took_s = 0.0  # those before

    @property
    def rows(self) -> int:
        """Rows that were sent, of each layer."""
        return sum(self._sent.values())

    async def catch_up(self) -> None:
        """Send until few rows are left, and the other side has taken them.

        Raises:
            MeshError: the link is lost, or the other side breaks the rules.
        """
        if not self._is_begun:
            await self._sync()
            self._is_begun = True
        self._begin = loop_time()
        for _ in range(MAX_PASSES):
            before = self.rows
            for session, stop in list(self._rank.committed.items()):
                await self._send(session, stop)
            if self.rows == before:
                break
            await self._sync()
        self._took_s += loop_time() - self._begin

    async def _sync(self) -> None:
        """Wait until the other side has taken all so far."""
        await self._link.send(encode(self._offer))
        while isinstance(answer := decode((await self._link.receive())[1]), UnknownRingMessage):
            pass  # of a later version
        if not isinstance(answer, KvOffer):
            raise PeerFault("No answer to an offer of KV caches")

    async def _send(self, session: SessionId, stop: int) -> None:
        """Send the rows of a session up to a position that were not sent yet."""
        start = self._sent.get(session, 0)
        if not await self._goes_on(session, start, stop):
            return
        for pos in range(start, stop, BLOCK_ROWS):
            if not self._is_sooner(range(pos, stop)):
                logger.info("rows from %d on are computed again: that is sooner", pos)
                return
            end = min(pos + BLOCK_ROWS, stop)
            for layer in (*self._layers, self._next_layer):
                if layer is not None:
                    await self._send_rows(session, layer, pos, end)
            if self._has_ended(session):
                return
            self._sent[session] = end

    async def _goes_on(self, session: SessionId, start: int, stop: int) -> bool:
        """Whether more rows of a session are worth sending, and its layers keep all of theirs."""
        if start:
            return stop - start >= FEW_ROWS and not self._has_ended(session)
        return not self._has_ended(session) and await self._worker.run(self._keeps_all, session)

    def _has_ended(self, session: SessionId) -> bool:
        """Whether no more rows of a session are sent, as a layer has none."""
        return any((session, layer) in self._ended for layer in self._layers)

    async def _send_rows(self, session: SessionId, layer: int, start: int, stop: int) -> None:
        """Send rows of a layer; if there are none, send no later ones either."""
        if (session, layer) in self._ended:
            return
        if parts := await self._worker.run(self._encoded, session, layer, start, stop):
            await self._link.send(parts)
            self._bytes += sum(map(len, parts))
        else:
            self._ended.add((session, layer))

    def _is_sooner(self, rows: range) -> bool:
        """Whether the rest of a session is sent sooner than it is computed again."""
        again_s = self._recompute_s(rows)
        if again_s is None or not self.rows or self._bytes < MEASURED_BYTES:
            return True
        took_s = self._took_s + loop_time() - self._begin
        return len(rows) * took_s / self.rows < again_s

    def _keeps_all(self, session: SessionId) -> bool:
        """Whether all layers keep the rows of a session; runs on the compute thread."""
        return all(self._copied(session, layer, 0, 1) for layer in self._layers)

    def _encoded(self, session: SessionId, layer: int, start: int, stop: int) -> list[Buffer]:
        """Encode rows of a layer; nothing if there are none. Runs on the compute thread."""
        copied = self._copied(session, layer, start, stop)
        if copied is None:
            return []
        try:
            blob = sealed(session_key(session), copied[0])
        except (ModelError, RuntimeError, MemoryError) as error:  # not finite, or out of memory
            logger.info("rows of a session are not handed over: %s", error)
            return []
        return encode(KvRows(session, layer, start, copied[1], blob))

    def _copied(
        self, session: SessionId, layer: int, start: int, stop: int
    ) -> tuple[Tensor, int] | None:
        """Copy rows, and where values begin in them; None without them, or without memory."""
        if (cache := self._rank.cache_of(session)) is None:
            return None
        try:
            if layer in self._layers:
                return cache.copied_rows(layer, start, stop)
            sent = cache.recorded(layer, start, stop)  # [1, T, D]
            return (sent[:, None].clone(), 0) if sent is not None else None
        except (RuntimeError, MemoryError) as error:  # out of memory
            logger.info("rows of a session are not handed over: %s", error)
            return None


class CacheSizes(Protocol):
    """Sizes of the caches of a model."""

    @property
    def context(self) -> int:
        """Maximum positions of a session."""

    @property
    def hidden_row_bytes(self) -> int:
        """Bytes of a hidden state between two layers."""

    def hidden_bytes(self, positions: int) -> int:
        """Return what hidden states of this many positions take."""

    def kv_row_bytes(self, layer: int) -> int:
        """Return the bytes of a position in a layer."""

    def kv_bytes(self, layer: int, positions: int) -> int:
        """Return what the cache of a layer takes for a session of this many positions."""


class KvReceiver:
    """Takes caches of layers that this node is about to take over from another one."""

    def __init__(self, worker: Worker, lend: Callable[[], bool], sizes: CacheSizes) -> None:
        """Take sessions of a model with these ``sizes``; ``lend`` provides `bytes` for them."""
        self._worker = worker
        self._lend = lend
        self._sizes = sizes
        self.sessions: dict[SessionId, ReceivedRows] = {}
        """What was handed over; in use by the compute thread until `is_closed`."""
        self.is_closed = False
        """Whether it takes nothing any more: what was handed over is used, or released."""
        self._taken: dict[tuple[SessionId, int], tuple[int, int]] = {}

    @property
    def bytes(self) -> int:
        """What is counted for all rows."""
        return sum(size for _, size in self._taken.values())

    async def serve(self, link: Link, answer: KvOffer, layers: Collection[int], last: int) -> None:
        """Take what another node sends of some ``layers``, or of the rows that enter ``last``.

        Raises:
            LinkLost: the other side has closed the link.
            PeerFault: it breaks the rules.
            ModelError: the model cannot have these rows.
            OutOfMemory: there is no memory for them.
        """
        while True:
            _, buffer = await link.receive()
            if self.is_closed:
                return
            match decode(buffer):
                case KvOffer():
                    await link.send(encode(answer))
                case KvRows() as rows if rows.layer in (layers if rows.split else (last,)):
                    await self._receive(rows)
                case UnknownRingMessage():
                    pass  # of a later version
                case other:
                    raise PeerFault(f"{type(other).__name__} instead of rows of its own layers")

    async def _receive(self, rows: KvRows) -> None:
        self._check(rows)
        key, stop = (rows.session, rows.layer), rows.pos + rows.rows
        before, known = self._taken.get(key, (0, 0)), {session for session, _ in self._taken}
        if rows.session not in known and len(known) == MAX_RECEIVED:
            return  # most of them have ended
        if rows.pos != before[0]:
            raise PeerFault(f"KV rows begin at position {rows.pos}, not {before[0]}")
        sizes = self._sizes
        size = sizes.kv_bytes(rows.layer, stop) if rows.split else sizes.hidden_bytes(stop)
        self._taken[key] = stop, size
        if not self._lend():
            self._taken[key] = before
            raise OutOfMemory("No memory for KV caches that are handed over")
        try:
            await self._worker.run(self._keep, rows)
        except MeshError:
            for each in [each for each in self._taken if each[0] == rows.session]:
                del self._taken[each]
            raise

    def _check(self, rows: KvRows) -> None:
        """Raise `MeshError` for rows that the model cannot have."""
        if rows.blob.dtype not in _PLAIN:
            raise PeerFault(f"KV rows cannot have dtype {rows.blob.dtype.name.lower()}")
        sizes, row = self._sizes, len(rows.blob.payload) // rows.rows
        most = sizes.kv_row_bytes(rows.layer) if rows.split else sizes.hidden_row_bytes
        if row > most:  # the budget counts less
            raise ModelError(f"KV rows of {row} bytes; this model has {most}")
        if rows.pos + rows.rows > sizes.context:
            raise PeerFault(f"KV rows exceed the context of {sizes.context} positions")

    def _keep(self, rows: KvRows) -> None:
        """Check rows, and keep them; runs on the compute thread."""
        try:
            tensor = _opened(rows)
            if not self.is_closed:
                held = self.sessions.setdefault(rows.session, ReceivedRows())
                held.add(rows.layer, rows.pos, rows.split, tensor)
        except (MeshError, RuntimeError, MemoryError) as error:  # the last two: out of memory
            self.sessions.pop(rows.session, None)
            if isinstance(error, MeshError):
                raise
            raise OutOfMemory(f"No memory for KV caches that are handed over: {error}") from None


def _opened(rows: KvRows) -> Tensor:
    """Verify rows, and view them as a tensor; raise `MeshError` if they are invalid."""
    tensor = opened(session_key(rows.session), rows.blob)
    if not is_finite(tensor):
        raise PeerFault("KV rows with infinite values or NaN")
    return tensor
