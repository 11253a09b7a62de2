"""Answers by outline: points that are expanded in parallel and joined in order."""

__all__ = ["backend", "eligibility"]
