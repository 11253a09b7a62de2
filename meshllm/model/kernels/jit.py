"""Compiles functions for the processor at hand.

Theory of operation
-------------------
A kernel of a library adds up in an order that depends on how much it is given, on the processor and
on the version. Functions of `meshllm.model.kernels.ir` say themselves what is added to what. LLVM
is a library and wants no compiler on the machine; a function takes it some ten milliseconds, a
tenth of a second at most, when it is first wanted. Its machine code is kept in the user's cache
folder under the text of the function, the processor and the version of LLVM, and read from there
by the next process, unless others may write to that folder.

Work is cut into blocks. Each thread takes the next one that nobody took, so one that is held up
holds up nobody else. The threads are those that torch computes with: a second set of them would
wait for the same cores.
"""

import ctypes
import logging
import mmap
import os
import platform
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import torch
from blake3 import blake3
from llvmlite import binding, ir

from meshllm.config import cache_path
from meshllm.model.json_cache import recall, remember
from meshllm.model.kernels.ir import INT, Code

_TEAM = "GOMP_parallel"  # of GNU's OpenMP, and of LLVM's, which has the names of both
_NOT_EXECUTABLE = "this system lets no memory become executable"
_NO_TEAM = f"torch {torch.__version__} depends on no OpenMP library with `{_TEAM}`"
_lock = threading.Lock()

logger = logging.getLogger(__name__)

Write = Callable[[Code, Mapping[str, ir.Value], ir.Value, ir.Value], None]
"""Writes what is done for one block, given the fields, its number and that of the thread."""


class Native:
    """A compiled function."""

    def __init__(self, fields: Sequence[str], write: Write, held: Collection[str] = ()) -> None:
        """Compile what ``write`` writes.

        ``fields`` name the whole numbers that it is given; a name with a star is an address. Those
        in ``held`` point to what outlives a step, such as weights: a recording keeps the address.

        Raises:
            RuntimeError: this system does not allow it, see `works`, or the code is not valid.
        """
        self.held = frozenset(f"*{name}" for name in held)
        assert self.held.issubset(fields), "only addresses are held"
        self._engine, self.digest = _compile(fields, write)  # owns the code; names what it does
        self.address: int = self._engine.get_function_address("work")
        self.fields = tuple(fields)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self._fields = ctypes.c_int64 * (3 + len(fields))

    def given(self, blocks: int, *values: int) -> "ctypes.Array[ctypes.c_int64]":
        """Write down what the function is called with; the first two numbers are 0 each time."""
        return self._fields(0, 0, blocks, *values)

    def __call__(self, blocks: int, threads: int, *values: int) -> None:
        """Do ``blocks`` blocks with so many threads, where torch has them."""
        if _hearing.hear:
            _hearing.hear(self, blocks, threads, values)
        given = self.given(blocks, *values)
        start = team() if threads > 1 else None
        if start is None:
            self._alone(ctypes.addressof(given))
        else:
            start(self.address, ctypes.addressof(given), threads, 0)


Hear = Callable[[Native, int, int, Sequence[int]], None]
"""Hears of a call: of what, with how many blocks, threads and which fields."""


class _Hearing(threading.local):
    """Who hears of the calls of a thread."""

    hear: Hear | None = None


_hearing = _Hearing()


@contextmanager
def heard(hear: Hear | None) -> Iterator[None]:
    """Tell of the calls of this thread; None stops that for a while."""
    before, _hearing.hear = _hearing.hear, hear
    try:
        yield
    finally:
        _hearing.hear = before


def processor() -> tuple[str, str]:
    """Name the processor to compile for, and what it can do, as LLVM does."""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def can(*features: str) -> bool:
    """Whether it can any of this."""
    return not {f"+{feature}" for feature in features}.isdisjoint(processor()[1].split(","))


def machine() -> tuple[str, ...]:
    """Tell the processor from others in the keys of what is measured: its model and features."""
    model = platform.processor()
    with suppress(OSError):  # of other systems, where the name that LLVM has says more
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        model = next((line for line in lines if line.startswith("model name")), model)
    return model, *processor(), torch.backends.cpu.get_cpu_capability()


@cache
def room() -> int:
    """Tell how many vectors of `LANES` sums its registers hold, and what else the work needs."""
    return 24 if can("avx512f") else 6  # of 32; of 16 in pairs, or of 32 in fours


def _compile(fields: Sequence[str], write: Write) -> tuple[Any, str]:
    """Compile a loop that takes blocks until there are no more.

    It is given a pointer to whole numbers: blocks taken, threads that came, blocks, and the fields.
    """
    module = ir.Module("native")
    work = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), "work")
    do = ir.IRBuilder(work.append_basic_block("entry"))
    code, (given,) = Code(do), work.args
    numbers = [
        do.load(code.at(given, code.index(2 + at), INT), typ=INT) for at in range(1 + len(fields))
    ]
    came = code.at(given, code.index(1), INT)
    thread = do.atomic_rmw("add", came, code.index(1), "monotonic")
    take, body, end = (work.append_basic_block(name) for name in ("take", "body", "end"))
    do.branch(take)
    do.position_at_end(take)
    block = do.atomic_rmw("add", given, code.index(1), "monotonic")
    do.cbranch(do.icmp_unsigned("<", block, numbers[0]), body, end)
    do.position_at_end(body)
    write(code, dict(_named(do, fields, numbers[1:])), block, thread)
    do.branch(take)
    do.position_at_end(end)
    do.ret_void()
    if not works():
        raise RuntimeError(_NOT_EXECUTABLE)
    with _lock:
        machine = _machine()
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        text = str(module)
        parsed = binding.parse_assembly(text)
        parsed.verify()  # LLVM compiles what is not valid as well, to anything
        engine = binding.create_mcjit_compiler(parsed, machine)
        key = text, *processor(), llvmlite.__version__
        if folder := private_folder():
            _keep(engine, folder, *key)
        engine.finalize_object()
    return engine, blake3(repr(key).encode()).hexdigest()


def _keep(engine: Any, folder: Path, *key: str) -> None:
    """Let the engine take its machine code from a folder, or leave it there."""

    def find(_: Any) -> bytes | None:
        try:
            known = recall(folder, *key)
            code = b64decode(known["code"])
            return code if blake3(code).hexdigest() == known["digest"] else None
        except (TypeError, ValueError, LookupError):  # unknown, or damaged
            return None

    def keep(_: Any, code: bytes) -> None:
        digest = blake3(code).hexdigest()
        remember(folder, {"code": b64encode(code).decode(), "digest": digest}, *key)

    engine.set_object_cache(keep, find)


@cache
def private_folder() -> Path | None:
    """Make the folder of machine code, and of verdicts on it.

    None where it cannot be made, is not the user's, or can be written to by others.
    """
    folder = cache_path() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        logger.info("machine code is not kept: %s", error)
        return None
    is_own = os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    if not is_own:
        logger.warning("`%s` is not used: others own it or can write to it", folder)
    return folder if is_own else None


def _named(
    do: ir.IRBuilder, fields: Sequence[str], numbers: Sequence[ir.Value]
) -> Iterator[tuple[str, ir.Value]]:
    for name, number in zip(fields, numbers, strict=True):
        pointer = do.inttoptr(number, ir.PointerType()) if name.startswith("*") else number
        yield name.removeprefix("*"), pointer


def _machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = processor()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )


@cache
def works() -> bool:
    """Whether memory may become executable; a hardened system refuses, and LLVM would crash."""
    if os.name != "posix":
        return True
    page = mmap.mmap(-1, mmap.PAGESIZE)
    held = ctypes.c_char.from_buffer(page)
    place, size = ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(mmap.PAGESIZE)
    refused = ctypes.CDLL(None).mprotect(place, size, mmap.PROT_READ | mmap.PROT_EXEC)
    del held
    page.close()
    if refused:
        logger.warning("no compiled kernels: %s", _NOT_EXECUTABLE)
    return not refused


@cache
def team() -> Callable[[int, int, int, int], None] | None:
    """Find how torch's own threads are set to work; None where it is built with others."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        # It is loaded already; what it depends on is searched, too.
        start = getattr(ctypes.CDLL(str(path)), _TEAM, None)
        if start is not None:
            start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            start.restype = None
            found: Callable[[int, int, int, int], None] = start
            return found
    logger.warning("compiled kernels use one thread: %s", _NO_TEAM)
    return None


def limits() -> tuple[str, ...]:
    """Say why kernels are not compiled here, or use one thread; empty where all is well."""
    if not works():
        return (f"no compiled kernels: {_NOT_EXECUTABLE}",)
    return () if team() else (f"compiled kernels use one thread: {_NO_TEAM}",)
