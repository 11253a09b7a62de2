"""Mesh membership: records, gossip, links, and the charter (the mesh-wide configuration)."""
