"""Compiled kernels: every block runs once, with the same bits on every CPU."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from llvmlite import binding, ir
from torch import Tensor

from meshllm.model import json_cache
from meshllm.model.kernels import attention as native_attention
from meshllm.model.kernels import gemm_int8, jit, rms_norm, softmax
from meshllm.model.kernels.ir import HALF, INT, LANES, WORD, Code
from meshllm.model.kernels.jit import CLAIMED, FINISHED, RUN, JitFunction
from meshllm.model.kernels.machine_code import CodeImage
from meshllm.model.kernels.program import Call, Program
from meshllm.model.modules.kernel_choice import has_bf16_dot
from meshllm.model.modules.quant_matrix import multiplies_matrices

BARE = "x86-64-v3", "+avx2,+fma,-avx512f"
"""A CPU of 2013: registers half as wide, and half as many."""
PR_GET_MDWE = (
    66  # include/uapi/linux/prctl.h: whether memory that was written may become executable
)


def test_every_block_runs_once_with_any_number_of_threads() -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        before = code.load(INT, fields["to"], block)
        code.store(
            INT, code.do.add(before, code.do.add(block, fields["more"])), fields["to"], block
        )

    function = JitFunction(("*to", "more"), write)

    for blocks in (1, 2, 5, 1000):
        for threads in (1, 2, 7):
            done = torch.zeros(blocks + 1, dtype=torch.int64)
            function(blocks, threads, done.data_ptr(), 3)
            assert torch.equal(done[:-1], torch.arange(3, blocks + 3))
            assert not done[-1]


def test_every_block_of_a_run_runs_once() -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        before = code.load(INT, fields["to"], block)
        code.store(INT, code.do.add(before, code.index(1)), fields["to"], block)

    function = JitFunction(("*to", RUN), write)

    for blocks in (1, 2, 5, 100):
        for run in (1, 3, 64):
            done = torch.zeros(blocks + run, dtype=torch.int64)
            function(blocks, 2, done.data_ptr(), run)
            assert done[:blocks].eq(1).all()
            assert not done[blocks:].any()


@pytest.mark.parametrize(("blocks", "run"), [(1, 1), (5, 1), (1, 64), (7, 3), (9, 3)])
def test_a_run_is_claimed_at_once(blocks: int, run: int) -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        code.store(INT, code.index(1), fields["to"], block)

    done = torch.zeros(blocks, dtype=torch.int64)
    call = Call.of(JitFunction(("*to", RUN), write), blocks, 1, (done.data_ptr(), run))

    Program([call]).run()

    assert done.all()
    assert call.given[CLAIMED] == (-(-blocks // run) + 1) * run  # the last time in vain
    assert call.given[FINISHED] == blocks


def sum_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, bool]:
    """Compile a sum with a cache folder; return 40 + 2, and whether it came from the cache."""

    def write(code: Code, fields: Mapping[str, ir.Value], _block: ir.Value, _: ir.Value) -> None:
        code.store(INT, code.do.add(fields["one"], fields["other"]), fields["to"], code.index(0))

    jit.processor()  # it is remembered, too
    kept: list[object] = []

    def keep(*what: Any) -> None:
        kept.append(what)
        json_cache.store_cached(*what)

    monkeypatch.setattr(jit, "private_folder", lambda: folder)
    monkeypatch.setattr(jit, "store_cached", keep)
    done = torch.zeros(1, dtype=torch.int64)
    JitFunction(("*to", "one", "other"), write)(1, 1, done.data_ptr(), 40, 2)
    return int(done), not kept


def test_machine_code_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum_of(tmp_path, monkeypatch) == (42, False)
    assert sum_of(tmp_path, monkeypatch) == (42, True)

    monkeypatch.setattr("llvmlite.__version__", "another")
    assert sum_of(tmp_path, monkeypatch) == (42, False)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_damaged_machine_code_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    sum_of(tmp_path, monkeypatch)
    (record,) = tmp_path.glob("*.json")
    text = record.read_text()
    known = json.loads(text)
    damaged = {
        "cut": text[: len(text) // 2],
        "changed": json.dumps(known | {"code": known["code"][::-1]}),
        "empty": "{}",
    }
    record.write_text(damaged[damage])

    assert sum_of(tmp_path, monkeypatch) == (42, False)
    assert sum_of(tmp_path, monkeypatch) == (42, True)


def test_llvm_loads_code_that_nothing_else_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_of(tmp_path, monkeypatch)
    asked = list[bytes]()

    def refuse(code: bytes) -> None:
        asked.append(code)

    monkeypatch.setattr(CodeImage, "of", refuse)

    assert sum_of(tmp_path, monkeypatch) == (42, True)
    assert len(asked) == 1


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The times that LLVM is asked for the CPU, and a folder in which its answer is kept."""
    asked = list[str]()

    def ask() -> str:
        asked.append("some CPU")
        return asked[0]

    monkeypatch.setattr(binding, "get_host_cpu_name", ask)
    monkeypatch.setattr(jit, "private_folder", lambda: tmp_path)
    monkeypatch.setattr(jit, "_cpu_lines", lambda: ("flags : one", "AVX2"))
    jit.processor.cache_clear()
    yield asked
    jit.processor.cache_clear()


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="no x86 CPU")
def test_a_chain_of_products_of_pairs_has_one_instruction_for_each() -> None:
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType()])
    function = ir.Function(module, kind, "work")
    code = Code(ir.IRBuilder(function.append_basic_block()))
    (given,) = function.args
    numbers = [code.load(HALF, given, code.index(at * 2 * LANES), 2 * LANES) for at in range(5)]
    total = code.do.bitcast(numbers[0], ir.VectorType(WORD, LANES))
    for each in numbers[1:]:
        total = code.multiply_pairs(each, numbers[0], total, at_once=True)
    code.store(WORD, total, given, code.index(0))
    code.do.ret_void()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    tuned = target.create_target_machine("cascadelake", jit._TUNING.removeprefix(","), 3)

    assembly = tuned.emit_assembly(binding.parse_assembly(str(module)))

    assert (assembly.count("vpdpwssd"), assembly.count("vpmaddwd")) == (4, 0)


def test_the_name_of_the_cpu_is_remembered(cpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.processor()
    jit.processor.cache_clear()

    name, features = first
    assert jit.processor() == first
    assert (name, features.removesuffix(jit._TUNING)) == (
        "some CPU", binding.get_host_cpu_features().flatten(),
    )  # fmt: skip
    assert len(cpu) == 1

    jit.processor.cache_clear()
    monkeypatch.setattr(jit, "_cpu_lines", lambda: ("flags : one two", "AVX2"))
    jit.processor()
    assert len(cpu) == 2


@pytest.mark.parametrize("kept", ["null", "[1, 2]", '["some CPU"]', "{"])
def test_a_damaged_name_of_the_cpu_is_asked_again(
    cpu: list[str], tmp_path: Path, kept: str
) -> None:
    first = jit.processor()
    (record,) = tmp_path.glob("*.json")
    record.write_text(kept)
    jit.processor.cache_clear()

    assert jit.processor() == first
    assert len(cpu) == 2


@pytest.mark.parametrize("name", ["private_folder", "_cpu_lines"])
def test_the_name_of_the_cpu_is_asked_where_it_cannot_be_kept(
    cpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(jit, name, tuple)

    first = jit.processor()
    jit.processor.cache_clear()

    assert jit.processor() == first
    assert len(cpu) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux only")
def test_the_cpu_is_described_by_what_does_not_change() -> None:
    first = jit._cpu_lines()
    jit._cpu_lines.cache_clear()

    assert jit._cpu_lines() == first
    assert first[-1] == torch.backends.cpu.get_cpu_capability()
    assert any(line.startswith(("flags", "Features")) for line in first)
    assert not any("MHz" in line or "processor" in line for line in first)


@pytest.mark.skipif(os.name != "posix", reason="no modes")
def test_machine_code_that_others_can_write_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "cache_path", lambda: tmp_path)
    find = jit.private_folder.__wrapped__

    folder = find()
    assert folder == tmp_path / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700

    folder.chmod(0o770)
    assert find() is None
    assert "can write to it" in caplog.text

    folder.rmdir()
    folder.touch()
    assert find() is None


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: the first thread runs all blocks")
def test_threads_have_different_indices() -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, by: ir.Value) -> None:
        with code.loop(code.index(1 << 20)) as loop:  # long enough for the other thread to start
            code.store(INT, loop.index, fields["to"], code.index(4))
        code.store(INT, by, fields["to"], block)

    function, by = JitFunction(("*to",), write), torch.zeros(5, dtype=torch.int64)

    def numbers() -> set[int]:
        function(4, 2, by.data_ptr())
        return set(by[:4].tolist())

    assert any(numbers() == {0, 1} for _ in range(5000))  # on a busy machine not at once


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux only")
def test_kernels_compile_where_the_system_allows_it() -> None:
    """Else tests of kernels would be skipped."""
    selinux = Path("/sys/fs/selinux/enforce")
    may_forbid = selinux.exists() and selinux.read_text() == "1"

    is_forbidden = ctypes.CDLL(None).prctl(PR_GET_MDWE, 0, 0, 0, 0) > 0

    assert jit.jit_available() or is_forbidden or may_forbid


def test_measurements_hold_only_where_kernels_may_be_compiled_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def identity(*, is_available: bool) -> tuple[str, ...]:
        monkeypatch.setattr(jit, "jit_available", lambda: is_available)
        return jit.machine.__wrapped__()

    assert identity(is_available=True) != identity(is_available=False)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="flags of Linux on x86-64"
)
def test_instructions_are_those_that_linux_lists() -> None:
    """Else tests of kernels would be skipped."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()

    flags = next(line for line in lines if line.startswith("flags")).split()

    assert jit.has_cpu_feature("avx512f") == ("avx512f" in flags)
    assert has_bf16_dot() == ("avx512_bf16" in flags)
    assert multiplies_matrices() == ("amx_bf16" in flags)


def test_features_of_arm_cpus_are_those_that_linux_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("CPU part: 0xd40", "Features        : fp asimd bf16", "flags: i8mm")
    monkeypatch.setattr(jit, "_cpu_lines", lambda: lines)

    assert jit.is_listed_by_linux("bf16")
    assert not jit.is_listed_by_linux("i8mm")


ALONE = """
import ctypes, torch
from llvmlite import binding
from meshllm.model.kernels import jit
libraries = lambda: {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
before = libraries()
team = jit.openmp_parallel()
print(team is not None, libraries() - before)

from meshllm.model.steps.attention import decode_attention, prefill_attention
from meshllm.model.modules.quant_kernels import kernel
from meshllm.names import Quant
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, Linux 6.3
    raise SystemExit
x = torch.ones(1, 1, 3, 16)
print(jit.jit_available(), decode_attention(x, x, x, 1.0).sum().item())
half = torch.ones(1, 8, 40, 64, dtype=torch.bfloat16)
print((half @ half.mT)[0, 0, 0, 0].item(), prefill_attention(half, half, half, 1.0).sum().item())
print(*jit.limits())
try:
    kernel(Quant.INT8)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def told() -> list[str]:
    """What a process says that finds torch's threads, and then may not execute what it writes."""
    if sys.platform != "linux":
        pytest.skip("/proc and prctl are Linux only")
    command = [sys.executable, "-W", "ignore", "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_finding_torchs_threads_loads_no_library(told: list[str]) -> None:
    assert told[0] == "True set()"


def test_a_system_that_forbids_executable_memory_is_detected(told: list[str]) -> None:
    if not told[1:]:
        pytest.skip("this kernel does not support it")
    first, prompt, limit, second = told[1:]
    assert first == "False 48.0"
    assert prompt == "64.0 20480.0"
    assert limit == "no compiled kernels: this system forbids executable memory"
    assert second.startswith("ModelError No int8 kernel on this machine")
    assert second.endswith("this system forbids executable memory")


def test_without_torchs_threads_one_thread_runs_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "openmp_parallel", lambda: None)

    test_every_block_runs_once_with_any_number_of_threads()


def test_missing_threads_of_torch_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "_PARALLEL", "of_no_library")
    jit.openmp_parallel.cache_clear()
    try:
        found = [jit.openmp_parallel() for _ in range(3)]
        limits = jit.limits()
    finally:
        monkeypatch.undo()
        jit.openmp_parallel.cache_clear()

    assert found == [None] * 3
    (limit,) = limits
    assert limit.startswith("compiled kernels use one thread: ")
    assert [record.getMessage() for record in caplog.records] == [limit]


def test_concurrent_calls_do_not_interfere() -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        code.store(INT, fields["what"], fields["to"], block)

    function = JitFunction(("*to", "what"), write)

    def call(what: int) -> bool:
        to = torch.zeros(3000, dtype=torch.int64)
        function(3000, 2, to.data_ptr(), what)
        return bool((to == what).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(1, 200)))


def test_only_machine_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, parsed = binding.parse_assembly, list[Any]()

    def note(text: str) -> Any:
        parsed.append(parse(text))
        return parsed[-1]

    monkeypatch.setattr(binding, "parse_assembly", note)

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        code.store(INT, code.do.add(block, code.index(7)), fields["to"], block)

    function, done = JitFunction(("*to",), write), torch.zeros(3, dtype=torch.int64)
    function(3, 1, done.data_ptr())

    assert [each.closed for each in parsed] == [True]
    assert done.tolist() == [7, 8, 9]


def test_tests_leave_the_users_cache_alone() -> None:
    assert jit.private_folder() == Path(os.environ["XDG_CACHE_HOME"], "meshllm", "kernels")


def test_invalid_ir_is_not_compiled() -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], _block: ir.Value, _: ir.Value) -> None:
        with code.do.if_then(ir.Constant(ir.IntType(1), 0)):
            value = code.do.add(fields["what"], code.index(1))
        code.store(INT, value, fields["to"], code.index(0))

    with pytest.raises(RuntimeError, match="does not dominate all uses"):
        JitFunction(("*to", "what"), write)


def computed() -> list[Tensor]:
    """Compute something with every kernel."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    results = []
    for heads, groups, width, rows, keys in (
        (4, 2, 64, 5, 77),
        (2, 2, 24, 5, 77),
        (8, 1, 128, 5, 77),
        (32, 8, 64, 500, 520),  # a million results: another order would change a few
    ):
        query, key, value = (
            normal(1, heads, rows, width),
            normal(1, groups, keys, width),
            normal(1, groups, keys, width),
        )
        results.append(native_attention.attend(query, key, value, width**-0.5))
    weights = torch.randint(-127, 128, (3, 100, 64, 2), generator=generator).to(torch.int8)
    scales = torch.rand(192, generator=generator)
    results += [gemm_int8.multiply(normal(rows, 200), weights, scales) for rows in (1, 4, 6, 9)]
    wide = torch.empty(200, 192, dtype=torch.bfloat16)
    gemm_int8.dequantise(weights, scales, wide)
    results += [rms_norm.norm(normal(9, width), normal(width), 1e-6) for width in (16, 200, 7)]
    for scores in (normal(2, 77, 128), normal(2, 77, 128).float(), normal(2, 77, 144)):
        softmax.causal_softmax_(scores, 50, 30)
        results.append(scores)
    return [*results, wide]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 only")
def test_an_older_cpu_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = (
        jit.registers,
        native_attention._function,
        gemm_int8._gemm,
        gemm_int8._quantiser,
        gemm_int8._dequantiser,
        rms_norm._function,
        softmax._function,
    )
    if not binding.get_host_cpu_features().get("fma"):
        pytest.skip("this CPU is older")
    here = computed()

    for each in compiled:
        each.cache_clear()
    monkeypatch.setattr(jit, "processor", lambda: BARE)
    there, registers = computed(), jit.registers()
    for each in compiled:
        each.cache_clear()

    assert registers == 6
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
