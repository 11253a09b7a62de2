"""Relays: the server, the client's registration, and the WebSocket fallback of UDP."""

__all__ = ["configured_relays", "relay", "relay_server", "relays"]
