"""KV caches in bytes: budget, admission, and the prefix cache."""

__all__ = ["admission", "budget", "prefix_index", "prefix_matching", "prefix_scope"]
