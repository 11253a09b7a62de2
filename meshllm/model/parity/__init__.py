"""Parity of a split model with the whole one, by model family."""

__all__ = ["cases", "check", "families", "verdict"]
