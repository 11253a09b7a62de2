"""Schedules models over machines: a simulator of their load, and a search for a placement."""
