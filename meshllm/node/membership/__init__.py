"""Membership: the state folder, admission of peers, and joining a mesh."""
