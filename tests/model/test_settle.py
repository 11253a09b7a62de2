"""Functions are called with one number before threads share out many."""

import subprocess
import sys

from meshllm.model.settle import FUNCTIONS

SPY = """
import torch
from torch.overrides import TorchFunctionMode

class Spy(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            print(function.__name__, args[0].dtype, args[0].numel())
        return function(*args, **(kwargs or {}))

with Spy():
    import meshllm.model.skeleton
"""


def test_who_can_run_a_model_has_called_them() -> None:
    said = subprocess.run(
        [sys.executable, "-c", SPY], capture_output=True, text=True, check=True, timeout=120
    )

    assert set(said.stdout.splitlines()) >= {
        f"{name} torch.{dtype} 1" for name in FUNCTIONS for dtype in ("float32", "float64")
    }
