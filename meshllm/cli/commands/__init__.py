"""The commands without a package of their own."""

__all__ = [
    "bench",
    "config",
    "help",
    "identity",
    "key",
    "model",
    "relay",
    "transport",
    "usage",
]
