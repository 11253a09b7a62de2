"""TLS identity and congestion control."""

__all__ = ["congestion", "identity"]
