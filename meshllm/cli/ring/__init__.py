"""`meshllm ring`."""
