"""Membership: the state folder, admission of peers, and joining a mesh."""

__all__ = ["admission", "bootstrap", "saved_models", "saved_records", "state_store"]
