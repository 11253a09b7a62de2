"""Sockets, interfaces and addresses of this machine."""
