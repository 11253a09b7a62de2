"""The embedded demonstration model's corpus and training code."""
