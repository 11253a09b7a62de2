"""Models: synchronous code over torch and transformers."""

__all__ = [
    "capacity",
    "device",
    "hardware",
    "json_cache",
    "locate",
    "pages",
    "pauses",
    "sampling",
    "shape",
    "timing",
    "without_compiler",
]
