"""`meshllm ring`."""

__all__ = ["plan", "ring", "status"]
