"""Whole models that a node provides with an engine of its own, such as vLLM or llama.cpp."""

from meshllm.node.provider import launch
from meshllm.node.provider.engine import EngineClient
from meshllm.node.provider.process import EngineProcess
from meshllm.node.provider.provider import NO_ANSWER, NO_MODELS, STARTING, Provider

__all__ = [
    "NO_ANSWER",
    "NO_MODELS",
    "STARTING",
    "EngineClient",
    "EngineProcess",
    "Provider",
    "launch",
]
