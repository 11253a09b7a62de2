"""Files of a model: its config, its weights, and their digests."""
