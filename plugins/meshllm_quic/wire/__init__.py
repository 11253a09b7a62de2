"""Wire formats: datagrams, stream records, cookies and routes."""

__all__ = ["cookies", "lanes", "offer", "packets", "routes"]
