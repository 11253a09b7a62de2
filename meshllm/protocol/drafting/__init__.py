"""Drafting for speculative decoding: the interface of drafters, and how many tokens to draft."""

__all__ = ["drafter", "known_text", "window"]
