"""What `meshllm bench` measures: engines beside transformers, and rings of nodes."""

__all__ = ["engine_table", "machine", "replay", "ring_table", "targets"]
