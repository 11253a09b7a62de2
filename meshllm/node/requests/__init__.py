"""Requests: answered on this node, or forwarded to the entry."""

__all__ = ["model_list", "peer_requests", "request_json", "router"]
