"""Requests: answered here, or by the node that can."""
