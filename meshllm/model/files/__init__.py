"""Files of a model: config, weights, and their digests."""
