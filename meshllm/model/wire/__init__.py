"""Encodings of hidden states as bytes."""
