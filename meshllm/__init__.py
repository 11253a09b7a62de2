"""Run one language model on several machines at once; knows only its own version."""

__version__ = "0.1.0"
