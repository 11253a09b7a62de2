"""Options of a node from flat keyword arguments."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from meshllm.node.options import InferenceConfig, NodeOptions

INFERENCE = {field.name for field in fields(InferenceConfig)}


def node_options(state: Path, **wishes: Any) -> NodeOptions:
    """Move the options of inference into their own record."""
    inference = {name: wishes.pop(name) for name in INFERENCE & wishes.keys()}
    return NodeOptions(state, inference=InferenceConfig(**inference), **wishes)
