"""Relays, and registration with them."""
