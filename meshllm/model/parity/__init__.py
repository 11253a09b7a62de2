"""Parity: whether a split model is the whole one, by family."""
