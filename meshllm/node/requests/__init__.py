"""Requests: answered on this node, or forwarded to the entry."""

__all__ = [
    "counts",
    "held_bytes",
    "model_list",
    "needs",
    "peer_requests",
    "request_json",
    "router",
]
