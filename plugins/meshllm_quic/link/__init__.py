"""Connections and links: dialling, listening, and the shared UDP socket."""

__all__ = ["dialer", "endpoint", "listener"]
