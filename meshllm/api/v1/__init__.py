"""`/v1/*`: the public API; a file for each dialect, over one internal request."""

__all__ = [
    "chat",
    "chat_socket",
    "completions",
    "counting",
    "embeddings",
    "messages",
    "models",
    "responses",
]
