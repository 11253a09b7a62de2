"""Relays: the server, the client's registration, and the WebSocket fallback of UDP."""
