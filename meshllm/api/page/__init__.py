"""The web page of a door: the mesh as it is, and a chat with its model."""

__all__ = ["routes"]
