"""The command line: each command parses, calls one function of a lower layer and prints."""

__all__ = ["app"]
