"""`meshllm chat`."""

__all__ = ["chat", "outlined"]
