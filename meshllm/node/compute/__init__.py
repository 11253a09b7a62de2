"""The compute thread: what runs on it, in which batches, and how long it takes."""
