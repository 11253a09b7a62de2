"""oneMKL is warmed up with one number, before several threads use it."""

import os
import re
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

from meshllm.model.without_compiler import without_compiler
with without_compiler(), Spy():
    from meshllm.model.files.source import load_stock, resolve
    from meshllm.model.parity.compare import random_model
    from meshllm.model.split.onemkl import rounds_by_alignment, warm_up_onemkl
    from meshllm.model.split.meta_model import build
    source = resolve("builtin")

calls = {
    "build": lambda: build(source.config, torch.float32),
    "load a stock model": lambda: load_stock(source, torch.float32),
    "make a random model": lambda: random_model(source.config, torch.float32).__enter__(),
}
for name, call in calls.items():
    print(f"[{name}]")
    warm_up_onemkl.cache_clear()  # as if it were the first one
    with Spy():
        call()
    print(rounds_by_alignment())
"""


@pytest.fixture(scope="module")
def spied() -> dict[str, str]:
    """What one process computes: while it imports, and then by what it calls."""
    stdout, stderr = probe(SPY)
    assert stderr == ""
    parts = re.split(r"^\[(.*)\]\n", stdout, flags=re.MULTILINE)
    return {"import": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("call", ["build", "load a stock model", "make a random model"])
def test_what_makes_a_model_warms_up_every_function_before_it_computes(
    spied: dict[str, str], call: str
) -> None:
    *called, depends = spied[call].splitlines()
    first = called[: 2 * len(FUNCTIONS)]

    assert spied["import"] == ""
    assert {*first} == {
        f"{name} torch.{dtype} 1" for name in FUNCTIONS for dtype in ("float32", "float64")
    }
    assert depends == "False"  # products are reproducible, though torch was first


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
