"""Nodes: asyncio drivers of the protocol machines, and a compute thread for the model."""

__all__ = [
    "admission_queue",
    "client",
    "client_control",
    "control",
    "event_loop",
    "node",
    "options",
]
