"""Drafters of speculative decoding."""
