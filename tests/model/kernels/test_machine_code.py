"""Machine code of the cache: loaded without LLVM where that gives the same."""

import ctypes
import platform
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from llvmlite import binding, ir

from meshllm.model.kernels import jit, machine_code
from meshllm.model.kernels.ir import INT, Code
from meshllm.model.kernels.jit import JitFunction
from meshllm.model.kernels.machine_code import CodeImage

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="LLVM loads all code"
)

COMPUTE = """
import hashlib, torch
from meshllm.model.kernels import attention, gemm_int8, rms_norm, softmax
draw = torch.Generator().manual_seed(3)
normal = lambda *shape: torch.randn(shape, generator=draw).bfloat16()
results = [rms_norm.norm(normal(9, width), normal(width), 1e-6) for width in (16, 200, 7)]
query, key, value = normal(1, 4, 5, 64), normal(1, 2, 77, 64), normal(1, 2, 77, 64)
results.append(attention.attend(query, key, value, 0.1))
weights = torch.randint(-127, 128, (3, 100, 64, 2), generator=draw).to(torch.int8)
results.append(gemm_int8.multiply(normal(4, 200), weights, torch.rand(192, generator=draw)))
softmax.causal_softmax_(scores := normal(2, 77, 144), 50, 30)
results.append(scores)
print(hashlib.sha256(b"".join(each.float().numpy().tobytes() for each in results)).hexdigest())
print("libllvmlite" in open("/proc/self/maps").read())
"""
TWICE = """
import os, sys
import torch  # once for both
for _ in range(2):
    if not os.fork():
        exec(sys.argv[1])
        sys.exit()
    assert os.wait()[1] == 0
"""
CONSTANT = "@one = private constant i64 42"
VARIABLE = "@one = internal global i64 42"


def compiled(constant: str, body: str, more: str = "", model: str = "jitdefault") -> bytes:
    """Compile a function of two pointers in a module, as kernels are."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(opt=3, jit=model == "jitdefault", codemodel=model)
    text = f"{constant}\ndefine void @work(ptr %to) {{ {body} ret void }}\n{more}"
    parsed = binding.parse_assembly(text)
    parsed.verify()
    return bytes(machine.emit_object(parsed))


POINT = "store volatile ptr @one, ptr %to"


def test_code_refers_to_its_constants() -> None:
    image = CodeImage.of(compiled(CONSTANT, POINT))
    assert image
    loaded = image.load()
    assert loaded
    to = ctypes.c_void_p()

    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loaded.address)(ctypes.addressof(to))

    assert ctypes.c_int64.from_address(to.value or 0).value == 42
    assert image.pointers


def test_memory_is_executable_or_writable() -> None:
    image = CodeImage.of(compiled(CONSTANT, POINT))
    loaded = image and image.load()
    assert loaded

    lines = Path("/proc/self/maps").read_text().splitlines()
    (mode,) = (
        mode
        for place, mode in (line.split()[:2] for line in lines)
        for start, end in [(int(each, 16) for each in place.split("-"))]
        if start <= loaded.address < end
    )

    assert mode == "r-xp"


BITS_64, BITS_32 = b"\x7fELF\x02", b"\x7fELF\x01"
X86, ARM = struct.pack("<HH", 1, 62), struct.pack("<HH", 1, 183)
MORE = "define void @more() { ret void }"
WIDE = "@one = private constant [9 x i64] zeroinitializer, align 8192"
LOAD_STORE = "%now = load volatile i64, ptr @one store i64 7, ptr @one store i64 %now, ptr %to"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: compiled(VARIABLE, LOAD_STORE), id="a variable"),
        pytest.param(lambda: compiled("declare void @other()", "call void @other()"), id="a call"),
        pytest.param(lambda: compiled(CONSTANT, POINT, model="small"), id="relative addresses"),
        pytest.param(lambda: compiled(CONSTANT, POINT, more=MORE), id="two functions"),
        pytest.param(lambda: compiled(WIDE, POINT), id="wide alignment"),
        pytest.param(lambda: compiled(CONSTANT, POINT).replace(BITS_64, BITS_32), id="32 bits"),
        pytest.param(lambda: compiled(CONSTANT, POINT).replace(X86, ARM), id="another processor"),
        pytest.param(bytes, id="empty"),
    ],
)
def test_code_of_another_form_is_left_to_llvm(make: Callable[[], bytes]) -> None:
    assert CodeImage.of(make()) is None


def test_code_that_may_not_run_is_left_to_llvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        code.store(INT, code.do.add(block, code.index(7)), fields["to"], block)

    def refuse(memory: object) -> bool:
        asked.append(memory)
        return False

    asked, done = list[object](), (ctypes.c_int64 * 3)()
    monkeypatch.setattr(jit, "private_folder", lambda: tmp_path)
    JitFunction(("*to",), write)
    monkeypatch.setattr(machine_code, "make_executable", refuse)

    JitFunction(("*to",), write)(3, 1, ctypes.addressof(done))

    assert list(done) == [7, 8, 9]
    assert len(asked) == 1


def test_kernels_in_the_cache_give_the_same_bits_without_llvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not jit.jit_available():
        pytest.skip("no compiled kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", TWICE, COMPUTE]

    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    first, is_loaded, *second = done.stdout.split()

    assert is_loaded == "True"
    assert second == [first, "False"]
