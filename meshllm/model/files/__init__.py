"""Files of a model: config, weights, and their digests."""

__all__ = ["loader", "manifest", "parts", "source"]
