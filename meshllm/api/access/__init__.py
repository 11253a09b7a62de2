"""Who may use the API: keys, their limits, and what was used."""

__all__ = ["accounts", "connection_limit", "gate", "revocations"]
