"""A description of the machine and the versions, stored with benchmark results."""

import os
import platform
from importlib.metadata import version

import torch

from meshllm.model.device import name_of

_PACKAGES = ("meshllm", "torch", "transformers")


def machine(threads: int | None = None, device: str = "cpu") -> dict[str, str | int | None]:
    """Describe this machine; ``threads`` is the number torch used, None its default."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "device": name_of(torch.device(device)),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }
