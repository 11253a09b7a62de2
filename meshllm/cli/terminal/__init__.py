"""Terminal output: tables, colours, wrapped text."""

__all__ = ["render", "streams", "wrap"]
