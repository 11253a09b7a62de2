"""Room for the KV caches of a rank."""

from meshllm.protocol.kv_cache.budget import BLOCK, KvCapacity


def room(blocks: int, *, fixed: int = 0, growth: int = 0, per_token: int = 1) -> KvCapacity:
    """Return a room for this number of blocks of tokens, plus fixed bytes and growth."""
    return KvCapacity(
        blocks * BLOCK * per_token,
        lambda tokens: (fixed + tokens * per_token, growth * tokens * per_token),
    )
