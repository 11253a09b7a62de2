"""Requests: answered on this node, or forwarded to the entry."""

__all__ = ["request_json", "router"]
