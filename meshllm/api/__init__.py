"""The face of a node: one HTTP application for the command line and every client."""

__all__ = ["port", "serve", "tcp", "unix"]
