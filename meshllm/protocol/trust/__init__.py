"""Identities, credentials, tickets, and the handshake between two peers."""

__all__ = [
    "announcement",
    "cipher",
    "credential",
    "fallbacks",
    "handshake",
    "identity",
    "ticket",
    "transcript",
]
