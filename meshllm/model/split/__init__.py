"""The split: a stock model on meta, cut into parts, with the KV cache of a part."""
