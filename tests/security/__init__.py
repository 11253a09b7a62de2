"""Attacks on real nodes, one for each point of the threat model: `python -m tests.security`."""
