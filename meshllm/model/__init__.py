"""Models: synchronous code over torch and transformers."""
