"""What plugin authors and tests of meshllm share; import the modules by name."""
