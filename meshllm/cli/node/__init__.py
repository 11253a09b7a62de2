"""`meshllm node`."""

__all__ = ["node", "provide", "serve"]
