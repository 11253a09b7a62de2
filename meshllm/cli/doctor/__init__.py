"""`meshllm doctor`."""

__all__ = ["doctor"]
