"""Relays: the server, the client's registration, and the WebSocket fallback of UDP."""

__all__ = ["berths", "relay", "relay_server", "relays"]
