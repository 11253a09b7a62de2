"""The HTTP API of a node: one application for the command line and every client."""

__all__ = ["port", "serve", "tcp", "unix"]
