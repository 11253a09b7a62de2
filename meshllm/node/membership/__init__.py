"""Membership: what is stored, who is admitted, and how a node joins."""
