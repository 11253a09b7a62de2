"""KV caches in bytes: budget, admission, and the prefix cache."""
