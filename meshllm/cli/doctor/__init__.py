"""`meshllm doctor`."""
