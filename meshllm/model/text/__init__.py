"""Tokenizer and incremental detokenizer."""
