"""Shared by several commands: options, the client of the running node, answers."""

__all__ = [
    "answer",
    "client",
    "complete",
    "deferred",
    "events",
    "local",
    "model_record",
    "options",
    "signals",
]
