"""UDP sockets and addresses."""

__all__ = ["address", "network", "udp"]
