"""Functions are called with one number before threads share out many."""

import os
import subprocess
import sys

import pytest

from meshllm.model.split.onemkl import FUNCTIONS, has_onemkl, rounds_by_alignment

SPY = """
import torch
from torch.overrides import TorchFunctionMode

class Spy(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            print(function.__name__, args[0].dtype, args[0].numel())
        return function(*args, **(kwargs or {}))

with Spy():
    import meshllm.model.split.skeleton
"""


def test_who_can_run_a_model_has_called_them() -> None:
    said = subprocess.run(
        [sys.executable, "-c", SPY], capture_output=True, text=True, check=True, timeout=120
    )

    assert set(said.stdout.splitlines()) >= {
        f"{name} torch.{dtype} 1" for name in FUNCTIONS for dtype in ("float32", "float64")
    }


def test_products_do_not_depend_on_where_matrices_lie() -> None:
    assert not rounds_by_alignment()


PROBE = """
import os
import torch
if "late" in os.environ:
    torch.ones(8, 8) @ torch.ones(8, 8)
from meshllm.model.split.onemkl import rounds_by_alignment
import meshllm.model.split.skeleton
print(rounds_by_alignment())
"""


def probe(**environment: str) -> tuple[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True, text=True, check=True, timeout=120, env=kept | environment,
    )  # fmt: skip
    return done.stdout, done.stderr


def test_whoever_loads_torch_first_has_them_too() -> None:
    assert probe() == ("False\n", "")


@pytest.mark.skipif(not has_onemkl(), reason="another BLAS")
def test_who_multiplies_before_is_told() -> None:
    depends, said = probe(late="yes")

    assert ("set `MKL_CBWR=AUTO`" in said) is (depends == "True\n")
