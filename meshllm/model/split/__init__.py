"""Model splitting: a stock model on meta, its shards, and the KV cache of a shard."""

__all__ = [
    "anatomy",
    "kv_cache",
    "onemkl",
    "received_rows",
    "rope",
    "session_cache",
    "shard",
    "skeleton",
    "stubs",
]
