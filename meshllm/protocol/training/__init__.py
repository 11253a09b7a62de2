"""Training through the layers of a node: the messages of a pass, and which node takes it."""

__all__ = ["codec", "route"]
