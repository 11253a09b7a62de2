"""Parity of a split model with the whole one, by model family."""
