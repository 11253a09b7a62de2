"""Transports: the contract that plugins implement, and the registry of installed plugins."""

__all__ = [
    "contract",
    "gathering",
    "half_open",
    "interfaces",
    "laned_link",
    "lanes",
    "linger",
    "names",
    "registry",
    "stream",
    "waiting",
]
