"""Transports: the contract that plugins implement, and the registry of installed plugins."""
