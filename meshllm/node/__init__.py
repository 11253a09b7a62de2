"""Nodes: asyncio drivers of the protocol machines, and a compute thread for the model."""
