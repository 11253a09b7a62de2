"""Weights from peers: who has which parts of a model, and the messages that ask for them."""

__all__ = ["codec", "holders"]
