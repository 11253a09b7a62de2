"""`meshllm ring`."""

__all__ = ["members", "plan", "ring", "status", "trace", "watch"]
