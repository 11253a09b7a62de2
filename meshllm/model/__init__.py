"""Models: synchronous code over torch and transformers."""

__all__ = ["capacity", "device", "lean", "locate", "pages", "pauses", "sampling", "shape", "timing"]
