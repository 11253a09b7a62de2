"""The compute thread, the batching of its jobs, and their timing."""

__all__ = ["batcher", "gauge", "stopwatch", "warm_up", "worker"]
