"""`meshllm ring`."""

__all__ = ["ring", "status"]
