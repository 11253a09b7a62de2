"""A generation and the messages of its entry."""

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.prefix_index import PrefixHit
from meshllm.protocol.session.actions import Embed, GenerationTask
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.messages import Blob, Data, DType, Flags, Forward
from meshllm.protocol.session.pace import PrefillPacing

SESSION = SessionId(bytes(range(16)))
EPOCH = 5
NO_FLAGS = Flags(0)
LAST_CHUNK = Flags.PREFILL | Flags.NEED_ROW

TASK = GenerationTask(
    SESSION, EPOCH, ring=3, prompt=(11, 12, 13, 14, 15), max_tokens=3, context=64, keep_from=1
)
PACE = PrefillPacing(chunk=2, window=2, patience_s=10.0, retries=2, close_s=4.0)


def chunk(gen: int, pos: int, tokens: tuple[int, ...]) -> Embed:
    """A chunk of the prompt."""
    return Embed(gen, pos, tokens, is_step=False)


def blob(rows: int) -> Blob:
    return seal(session_key(SESSION), DType.BFLOAT16, (1, rows, 4), bytes(8 * rows))


def sent(pos: int, rows: int, flags: Flags = NO_FLAGS, gen: int = 0) -> Forward:
    return Forward(Data(SESSION, EPOCH, gen, pos, rows, flags, blob(rows)))


def back(pos: int, rows: int, gen: int = 0, row: Blob | None = None) -> Data:
    return Data(SESSION, EPOCH, gen, pos, rows, NO_FLAGS, row)


BASE = PrefixHit(SessionId(b"b" * 16), 2, whole=True)
