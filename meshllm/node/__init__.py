"""Nodes at work: asyncio around the machines, the compute thread around the model."""
