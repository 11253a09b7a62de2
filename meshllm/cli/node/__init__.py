"""`meshllm node`."""

__all__ = ["node", "serve"]
