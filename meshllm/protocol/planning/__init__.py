"""Plans: who holds which layers, how fast that is, and why."""

__all__ = ["chunking", "explain", "partition", "plan", "policies", "prediction", "problem", "tours"]
