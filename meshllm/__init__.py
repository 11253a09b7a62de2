"""Run one language model on several machines at once."""

__version__ = "0.1.0"
