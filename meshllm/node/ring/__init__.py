"""The ring: a model held in part, and the ranks that run it."""
