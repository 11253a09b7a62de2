"""JIT compiler for CPU kernels.

Theory of operation
-------------------
The summation order of a library kernel depends on the shape, the CPU and the library version.
Kernels written with `meshllm.model.kernels.ir` fix their own summation order. LLVM is used as a
library, so no compiler has to be installed; compiling a kernel takes some ten milliseconds, a fifth
of a second at most, on first use. The machine code is cached in the user's cache folder, keyed by
the IR, the CPU and the version of llvmlite, and loaded from there by later processes, without LLVM
where `meshllm.model.kernels.machine_code` can. Without a folder that only the user can write to,
nothing is cached.

Work is divided into blocks. Each thread claims the next free one, or a short run of adjacent ones,
so a delayed thread hardly delays the others. The threads are those of torch: a second pool would
compete for the same cores.
"""

import ctypes
import logging
import os
import platform
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite
import torch
from blake3 import blake3
from llvmlite import ir
from torch import Tensor

from meshllm.config import cache_path
from meshllm.model.hardware import allows_executable_memory, cpu_lines
from meshllm.model.json_cache import load_cached, store_cached
from meshllm.model.kernels.ir import INT, Code
from meshllm.model.kernels.machine_code import CodeImage

CLAIMED, STARTED, FINISHED, BLOCKS = range(4)
"""Places in the arguments of a kernel (`JitFunction.given`): of blocks how many are claimed, of
threads how many came, how many blocks are finished by threads that left, and blocks in all."""
FIELDS = 4
"""Place of the first field in the arguments."""

RUN = "run"
"""Name of the field, if a kernel has it, with the number of adjacent blocks claimed at once."""

_ENTRY = "work"  # the function of a kernel
_PARALLEL = "GOMP_parallel"  # of GNU's OpenMP runtime; LLVM's exports the same name
_TUNING = ",+fast-dpwssd"  # else LLVM splits chains of this x86 instruction into two for each
_NOT_EXECUTABLE = "this system forbids executable memory"
_NO_OPENMP = f"torch {torch.__version__} is not linked to an OpenMP library with `{_PARALLEL}`"
_lock = threading.Lock()

logger = logging.getLogger(__name__)

Write = Callable[[Code, Mapping[str, ir.Value], ir.Value, ir.Value], None]
"""Emits the code of one block, given the fields, the block index and the thread index."""


class JitFunction:
    """A compiled kernel."""

    def __init__(self, fields: Sequence[str], write: Write, held: Collection[str] = ()) -> None:
        """Compile the code that ``write`` emits for each block.

        ``fields`` name its integer arguments; a leading star marks a pointer. Pointers named in
        ``held`` refer to memory that outlives a step, such as weights: a trace may record them.

        Raises:
            RuntimeError: executable memory is forbidden, see `jit_available`, or the IR is invalid.
        """
        self.held = frozenset(f"*{name}" for name in held)
        assert self.held.issubset(fields), "only pointers can be held"
        self._code, self.address, self.digest = _compile(fields, write)
        self.fields = tuple(fields)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self._fields = ctypes.c_int64 * (FIELDS + len(fields))

    def given(self, blocks: int, *values: int) -> "ctypes.Array[ctypes.c_int64]":
        """Return the argument array; its counters must be 0 before each call."""
        return self._fields(0, 0, 0, blocks, *values)

    def __call__(self, blocks: int, threads: int, *values: int) -> None:
        """Run ``blocks`` blocks on ``threads`` threads of torch; on one if these are not found."""
        if _observer.observe:
            _observer.observe(self, blocks, threads, values)
        given = self.given(blocks, *values)
        start = openmp_parallel() if threads > 1 else None
        if start is None:
            self._alone(ctypes.addressof(given))
        else:
            start(self.address, ctypes.addressof(given), threads, 0)


CallObserver = Callable[[JitFunction, int, int, Sequence[int]], None]
"""Observes a call: the kernel, its blocks, threads and field values."""


class _CallObserver(threading.local):
    """The observer of a thread's kernel calls."""

    observe: CallObserver | None = None


_observer = _CallObserver()


@contextmanager
def observe_calls(observer: CallObserver | None) -> Iterator[None]:
    """Pass this thread's kernel calls to ``observer`` within the block; None suspends that."""
    before, _observer.observe = _observer.observe, observer
    try:
        yield
    finally:
        _observer.observe = before


class _Scratch(threading.local):
    """The buffer of a thread; new pages would cost page faults."""

    numbers = torch.empty(0, dtype=torch.bfloat16)


_scratch = _Scratch()


def scratch(count: int) -> Tensor:
    """Return a buffer of ``count`` bfloat16 numbers, valid until this thread's next call."""
    if len(_scratch.numbers) < count:
        _scratch.numbers = torch.empty(count, dtype=torch.bfloat16)
    return _scratch.numbers[:count]


@cache
def processor() -> tuple[str, str]:
    """Return LLVM's name of the CPU to compile for, and its feature string with our `_TUNING`.

    Both are remembered for what Linux and torch say of the CPU: LLVM's library is large.
    """
    key = "processor", llvmlite.__version__, _TUNING, *_cpu_lines()
    folder = private_folder() if _cpu_lines() else None
    known = load_cached(folder, *key) if folder else None
    if isinstance(known, list) and [type(each) for each in known] == [str, str]:
        return known[0], known[1]
    from llvmlite import binding

    tuning = _TUNING if platform.machine().lower() in {"x86_64", "amd64"} else ""
    found = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten() + tuning
    if folder:
        store_cached(folder, found, *key)
    return found


@cache
def _cpu_lines() -> tuple[str, ...]:
    """Return what describes the CPU to Linux and to torch; nothing if its features are unknown."""
    lines = cpu_lines()
    return (*lines, torch.backends.cpu.get_cpu_capability()) if lines else ()


def is_listed_by_linux(feature: str) -> bool:
    """Whether Linux lists a feature of an ARM CPU; LLVM does not report all of them."""
    lists = (line.split() for line in _cpu_lines() if line.startswith("Features"))
    return any(feature in words for words in lists)


@cache
def has_fma() -> bool:
    """Whether the CPU has an instruction for `Code.fma`; else each is a call of a slow routine."""
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return not is_x86 or has_cpu_feature("fma")


def has_cpu_feature(*features: str) -> bool:
    """Whether the CPU has any of these LLVM features."""
    return not {f"+{feature}" for feature in features}.isdisjoint(processor()[1].split(","))


@cache
def machine() -> tuple[str, ...]:
    """Return what identifies this machine in cache keys of measurements.

    The model and features of its CPU, and whether this process may compile kernels for it.
    """
    model = platform.processor()
    with suppress(OSError):  # not on Linux: there LLVM's name says more
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next((line for line in lines if line.startswith("model name")), model)
    kernels = "compiled kernels" if jit_available() else "no compiled kernels"
    return model, *processor(), torch.backends.cpu.get_cpu_capability(), kernels


@cache
def registers() -> int:
    """Return how many vectors of `LANES` sums fit in registers next to the other operands."""
    return 24 if has_cpu_feature("avx512f") else 6  # of 32; of 16 in pairs, or of 32 in fours


def _compile(fields: Sequence[str], write: Write) -> tuple[Any, int, str]:
    """Compile a loop that claims blocks until none are left; see `_compile_module`."""
    module = ir.Module("native")
    work = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), _ENTRY)
    do = ir.IRBuilder(work.append_basic_block("entry"))
    code, (given,) = Code(do), work.args
    blocks, *numbers = (
        code.load(INT, given, code.index(BLOCKS + at)) for at in range(1 + len(fields))
    )
    claimed, started, finished = (
        code.at(given, code.index(place), INT) for place in (CLAIMED, STARTED, FINISHED)
    )
    thread = do.atomic_rmw("add", started, code.index(1), "monotonic")
    entry, (take, body, end) = do.block, [work.append_basic_block() for _ in range(3)]
    do.branch(take)
    do.position_at_end(take)
    done = do.phi(INT)
    done.add_incoming(code.index(0), entry)
    named = dict(_named(do, fields, numbers))
    most = named.get(RUN, code.index(1))
    first = do.atomic_rmw("add", claimed, most, "monotonic")
    do.cbranch(do.icmp_unsigned("<", first, blocks), body, end)
    do.position_at_end(body)
    left = do.sub(blocks, first)
    count = do.select(do.icmp_unsigned("<", left, most), left, most)
    with code.loop(count) as loop:
        write(code, named, do.add(first, loop.index), thread)
    done.add_incoming(do.add(done, count), do.block)
    do.branch(take)
    do.position_at_end(end)
    do.atomic_rmw("add", finished, done, "release")  # see `meshllm.model.kernels.program`
    do.ret_void()
    return _compile_module(module)


def _compile_module(module: ir.Module) -> tuple[Any, int, str]:
    """Load a module from the cache, or compile it.

    Return what owns the machine code, its address, and a digest of the module.
    """
    if not jit_available():
        raise RuntimeError(_NOT_EXECUTABLE)
    key = str(module), *processor(), llvmlite.__version__, platform.system(), platform.machine()
    digest = blake3(repr(key).encode()).hexdigest()
    with _lock:
        folder = private_folder()
        known = _cached(folder, *key) if folder else None
        image = CodeImage.of(known) if known and platform.system() == "Linux" else None
        if image and (loaded := image.load()):
            return loaded, loaded.address, digest
        keep = partial(_keep, folder, key) if folder else None
        engine = _engine(module, known, keep)
    return engine, engine.get_function_address(_ENTRY), digest


def _engine(
    module: ir.Module, known: bytes | None, keep: Callable[[Any, bytes], None] | None
) -> Any:
    """Load machine code with LLVM; compile it unless it is known."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = processor()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()  # LLVM compiles invalid IR, too, to arbitrary code
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.set_object_cache(keep, lambda _: known)
    engine.finalize_object()
    engine.set_object_cache()  # it holds the text of the module
    engine.remove_module(parsed)
    parsed.close()  # half of the memory of a kernel
    return engine


def _cached(folder: Path, *key: str) -> bytes | None:
    try:
        known = load_cached(folder, *key)
        code = b64decode(known["code"])
        return code if blake3(code).hexdigest() == known["digest"] else None
    except (TypeError, ValueError, LookupError):  # not cached, or damaged
        return None


def _keep(folder: Path, key: tuple[str, ...], _: Any, code: bytes) -> None:
    digest = blake3(code).hexdigest()
    store_cached(folder, {"code": b64encode(code).decode(), "digest": digest}, *key)


@cache
def private_folder() -> Path | None:
    """Create the cache folder of machine code, and of trial results of that code.

    None if it cannot be created, belongs to another user, or is writable by others.
    """
    folder = cache_path() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        logger.info("machine code is not cached: %s", error)
        return None
    is_own = os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    if not is_own:
        logger.warning("`%s` is not used as a cache: another user owns or can write to it", folder)
    return folder if is_own else None


def _named(
    do: ir.IRBuilder, fields: Sequence[str], numbers: Sequence[ir.Value]
) -> Iterator[tuple[str, ir.Value]]:
    for name, number in zip(fields, numbers, strict=True):
        pointer = do.inttoptr(number, ir.PointerType()) if name.startswith("*") else number
        yield name.removeprefix("*"), pointer


@cache
def jit_available() -> bool:
    """Whether memory can be made executable; on a hardened system LLVM would crash.

    If not, oneDNN, which compiles its kernels too, is disabled: torch has others.
    """
    if allows_executable_memory():
        return True
    logger.warning("no compiled kernels: %s", _NOT_EXECUTABLE)
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    return False


@cache
def openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """Return the OpenMP function that starts torch's threads; None if torch uses others."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        # The library is loaded already; its dependencies are searched, too.
        start = getattr(ctypes.CDLL(str(path)), _PARALLEL, None)
        if start is not None:
            start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            start.restype = None
            found: Callable[[int, int, int, int], None] = start
            return found
    logger.warning("compiled kernels use one thread: %s", _NO_OPENMP)
    return None


def limits() -> tuple[str, ...]:
    """Return why kernels are not compiled here, or use one thread; empty if neither holds."""
    if not jit_available():
        return (f"no compiled kernels: {_NOT_EXECUTABLE}",)
    return () if openmp_parallel() else (f"compiled kernels use one thread: {_NO_OPENMP}",)
