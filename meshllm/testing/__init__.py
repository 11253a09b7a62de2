"""Test tools for plugin authors and for meshllm itself; import the modules by name."""

__all__ = ["clock", "counting", "links", "models", "transports"]
