"""Identities, credentials, tickets, and the handshake between two peers."""
