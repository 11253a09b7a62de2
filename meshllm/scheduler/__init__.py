"""Schedules models over machines: a simulator of their load, and a search for a placement."""

__all__ = ["architecture", "load", "machine", "placement", "reasons", "schedule", "simulator"]
