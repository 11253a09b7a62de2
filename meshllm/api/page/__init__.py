"""The web page of an API server: the mesh as it is, and a chat with its model."""

__all__ = ["routes"]
