"""One request of the mesh behind every dialect: its fields, limits, tools, and its reply."""

__all__ = [
    "extension",
    "generating",
    "headers",
    "prompts",
    "reply",
    "service",
    "structured",
    "tools",
]
