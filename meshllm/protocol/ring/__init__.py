"""The ring of a plan: how it forms, and what becomes of a request when it breaks."""
