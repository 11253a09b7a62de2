"""Shared by several commands: options, the client of the running node, answers."""
