"""Nodes: asyncio drivers of the protocol machines, and a compute thread for the model."""

__all__ = ["client", "control", "node", "options"]
