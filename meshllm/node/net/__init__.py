"""Links to other nodes: discovery, dialling, encryption."""

__all__ = ["beacon", "dialer", "endpoints", "mesh_link", "peer_address", "secure"]
