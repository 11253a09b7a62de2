"""Identities and congestion control."""
