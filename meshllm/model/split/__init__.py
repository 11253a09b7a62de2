"""Model splitting: a stock model on meta, its shards, and the KV cache of a shard."""

__all__ = [
    "kv_cache",
    "meta_model",
    "onemkl",
    "received_rows",
    "rope",
    "session_cache",
    "shard",
    "structure",
    "stubs",
]
