"""The ring runtime: loads a span of the model and runs it as a rank of the plan in force."""

__all__ = ["local_ring", "memory", "model_runtime", "runtime", "shape"]
