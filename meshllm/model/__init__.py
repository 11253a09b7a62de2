"""Models: torch and transformers, synchronous; knows nothing about the network."""
