"""Running the steps of a shard: loading, self-test, tracing, replay and CUDA graphs."""

__all__ = ["execution", "lm_head", "load", "replay", "runner", "strategies", "trial"]
