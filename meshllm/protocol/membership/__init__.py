"""Mesh membership: records, gossip, links, and the charter (the mesh-wide configuration)."""

__all__ = [
    "actions",
    "charter",
    "client_quota",
    "codec",
    "dial_limit",
    "duplicate_identity",
    "gossip",
    "link_table",
    "mesh",
    "peer_limit",
    "read_budget",
    "records",
]
