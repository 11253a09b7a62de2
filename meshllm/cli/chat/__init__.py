"""`meshllm chat`."""
