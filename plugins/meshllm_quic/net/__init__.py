"""UDP sockets, network interfaces, and addresses."""
