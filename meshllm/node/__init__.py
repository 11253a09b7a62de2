"""Nodes: asyncio drivers of the protocol machines, and a compute thread for the model."""

__all__ = ["client", "client_control", "control", "node", "options"]
