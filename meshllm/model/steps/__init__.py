"""Running the steps of a shard: loading, self-test, tracing, replay and CUDA graphs."""
