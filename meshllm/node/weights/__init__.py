"""Weights that travel between nodes: sent to those that lack them, fetched from those that have."""

from meshllm.node.weights.fetcher import WeightFetcher
from meshllm.node.weights.server import WeightServer
from meshllm.node.weights.supply import WeightSupply

__all__ = ["WeightFetcher", "WeightServer", "WeightSupply"]
