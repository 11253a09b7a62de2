"""UDP sockets, network interfaces, and addresses."""

__all__ = ["address", "network", "udp"]
