"""Requests: answered on this node, or forwarded to the entry."""
