"""Traces of requests: lengths, times and shared prefixes, without text or user."""

__all__ = ["file", "prompts", "recorder", "trace"]
