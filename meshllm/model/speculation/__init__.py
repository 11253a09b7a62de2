"""Drafters of speculative decoding."""

__all__ = ["draft_model", "prompt_lookup"]
