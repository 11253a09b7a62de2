"""Sessions and the messages of a stage."""

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import KvBudget
from meshllm.protocol.kv_cache.prefix_index import PrefixIndex
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.messages import Blob, Data, DType, Flags, JobTimes
from meshllm.protocol.session.stage import Compute
from tests.builders.rooms import room

ONE, TWO = SessionId(b"1" * 16), SessionId(b"2" * 16)
EPOCH = 5
NO_FLAGS = Flags(0)
SPENT = JobTimes(compute_us=10, serialise_us=3, queue_us=1)


def blob(rows: int) -> Blob:
    return seal(session_key(ONE), DType.BFLOAT16, (1, rows, 4), bytes(8 * rows))


def data(
    pos: int, rows: int = 1, gen: int = 0, flags: Flags = NO_FLAGS, session: SessionId = ONE
) -> Data:
    return Data(session, EPOCH, gen, pos, rows, flags, blob(rows))


def compute(pos: int, rows: int, keep: int, session: SessionId = ONE) -> Compute:
    return Compute(session, pos, rows, keep, blob(rows), is_step=True)


THREE = SessionId(b"3" * 16)


def shelf_of(blocks: int, most_bytes: int | None = None, idle_s: float = 600.0) -> PrefixIndex:
    return PrefixIndex(KvBudget([room(blocks)]), most_bytes, idle_s=idle_s)
