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
    from meshllm.model.files.source import load_stock, resolve
    from meshllm.model.parity.compare import random_model
    from meshllm.model.split.onemkl import rounds_by_alignment
    from meshllm.model.split.skeleton import build
    source = resolve("builtin")

print("imported")
with Spy():
    {call}
print(rounds_by_alignment())
"""
_CALLS = {
    "build": "build(source.config, torch.float32)",
    "load a stock model": "load_stock(source, torch.float32)",
    "make a random model": "random_model(source.config, torch.float32).__enter__()",
}


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_what_makes_a_model_warms_up_every_function_before_it_computes(call: str) -> None:
    stdout, stderr = probe(SPY.replace("{call}", call))
    before, _, after = stdout.partition("imported\n")
    *called, depends = after.splitlines()
    first = called[: 2 * len(FUNCTIONS)]

    assert before == ""
    assert {*first} == {
        f"{name} torch.{dtype} 1" for name in FUNCTIONS for dtype in ("float32", "float64")
    }
    assert (depends, stderr) == ("False", "")  # products are reproducible, though torch was first


def test_products_do_not_depend_on_alignment() -> None:
    assert not rounds_by_alignment()


LATE = """
import torch
torch.ones(8, 8) @ torch.ones(8, 8)
from meshllm.model.split.onemkl import rounds_by_alignment, warm_up_onemkl
warm_up_onemkl()
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
def test_a_product_before_the_warm_up_is_warned_about() -> None:
    depends, stderr = probe(LATE)

    assert ("set `MKL_CBWR=AUTO`" in stderr) is (depends == "True\n")
