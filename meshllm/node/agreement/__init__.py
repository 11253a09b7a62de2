"""What is agreed on, and what follows here: plans followed, rings served, offers published."""

__all__ = [
    "charter_editor",
    "offer",
    "own_state",
    "ring_directory",
    "ring_server",
    "ring_service",
]
