"""`meshllm chat`."""

__all__ = ["chat", "prompt"]
