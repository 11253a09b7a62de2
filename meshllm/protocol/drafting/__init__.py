"""Drafts of speculative decoding: who makes them, and how many tokens are worth it."""
