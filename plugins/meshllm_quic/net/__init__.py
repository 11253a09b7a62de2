"""UDP sockets, network interfaces, and addresses."""

__all__ = ["address", "interfaces", "network", "udp"]
