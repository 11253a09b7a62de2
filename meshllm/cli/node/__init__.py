"""`meshllm node`."""
