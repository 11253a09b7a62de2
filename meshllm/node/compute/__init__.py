"""The compute thread, the batching of its jobs, and their timing."""
