"""Models: torch and transformers, synchronous."""
