"""Encodings of hidden states as bytes."""

__all__ = ["payload"]
