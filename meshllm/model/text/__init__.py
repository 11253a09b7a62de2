"""Tokenizer and incremental detokenizer."""

__all__ = [
    "answer_parser",
    "detokenizer",
    "grammar",
    "grammar_trial",
    "pooling",
    "reasoning",
    "tokenizer",
    "tool_format",
    "tool_parser",
]
