"""The embedded demonstration model, its corpus, and how to rebuild it."""
