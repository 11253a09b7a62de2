"""oneMKL is warmed up with one number, before several threads use it."""

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

from meshllm.model.lean import lean
with lean(), Spy():
    import meshllm.model.split.skeleton
from meshllm.model.split.onemkl import rounds_by_alignment
print(rounds_by_alignment())
"""


def test_importing_the_skeleton_warms_up_every_function() -> None:
    stdout, stderr = probe(SPY)
    *called, depends = stdout.splitlines()

    assert {*called} >= {
        f"{name} torch.{dtype} 1" for name in FUNCTIONS for dtype in ("float32", "float64")
    }
    assert (depends, stderr) == ("False", "")  # products are reproducible, though torch was first


def test_products_do_not_depend_on_alignment() -> None:
    assert not rounds_by_alignment()


LATE = """
import torch
torch.ones(8, 8) @ torch.ones(8, 8)
from meshllm.model.split.onemkl import rounds_by_alignment
import meshllm.model.split.skeleton
print(rounds_by_alignment())
"""


def probe(code: str) -> tuple[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, timeout=120, env=kept,
    )  # fmt: skip
    return done.stdout, done.stderr


@pytest.mark.skipif(not has_onemkl(), reason="another BLAS")
def test_a_product_before_the_import_is_warned_about() -> None:
    depends, stderr = probe(LATE)

    assert ("set `MKL_CBWR=AUTO`" in stderr) is (depends == "True\n")
