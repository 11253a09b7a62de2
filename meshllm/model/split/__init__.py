"""Model splitting: a stock model on meta, its shards, and the KV cache of a shard."""
