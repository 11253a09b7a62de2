"""`meshllm tui`."""

__all__ = ["tui"]
