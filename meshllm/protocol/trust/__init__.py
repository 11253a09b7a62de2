"""Identities, credentials, tickets, and the handshake of two peers."""
