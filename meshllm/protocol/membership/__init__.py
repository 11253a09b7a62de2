"""Members of a mesh: records, gossip, links, and the charter."""
