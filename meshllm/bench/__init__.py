"""What `meshllm bench` measures: engines beside transformers, and rings of nodes."""
