"""The device of a model, and copies between it and the CPU.

Theory of operation: a GPU runs asynchronously to the program. So the rows of a job are copied there
once, from pinned memory and without blocking; the kernels are queued behind the copy; and the
output is copied back once, which is the only wait. torch caches the pinned memory for the next job,
and reuses a piece of it only when the copy from it is done. On the CPU nothing is copied, and
nothing waits.
"""

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from shutil import which

import torch
from torch import Tensor

from meshllm.config import c_compiler
from meshllm.errors import ModelError, UserError
from meshllm.model.hardware import usable_cores
from meshllm.names import Quant

CPU = torch.device("cpu")

_NATIVE_BFLOAT16 = (8, 0)  # compute capability; older ones emulate it in float32

_ALLOCATORS = (
    "can't allocate memory",  # torch on the CPU
    "cannot allocate memory",  # the system, for ENOMEM
    "could not allocate memory",  # torch, for the sizes of a tensor
    "bad_alloc",  # C++
    "out of memory",  # CUDA, and other GPUs
)
"""What allocators say, in lower case; model code may say `allocate` of anything."""

logger = logging.getLogger(__name__)


def choose(wanted: str, dtype: torch.dtype, quant: Quant = Quant.NONE) -> torch.device:
    """Return the requested device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    ``auto`` is the first GPU if it supports weights in ``dtype`` and ``quant``, else the CPU.

    Raises:
        UserError: there is no such device.
        ModelError: it does not support such weights.
    """
    if _is_cpu(wanted):
        return CPU
    device = _gpu("cuda" if wanted == "auto" else wanted)
    refusal = _refuse(device, dtype, quant)
    if refusal is None:
        logger.info("computing on %s", name_of(device))
        return device
    if wanted != "auto":
        raise refusal
    return CPU


def refused_gpu(wanted: str, dtype: torch.dtype, quant: Quant = Quant.NONE) -> str:
    """Return why `choose` takes the CPU though there is a GPU; "" if it does not."""
    if wanted != "auto" or _is_cpu(wanted):
        return ""
    return str(_refuse(_gpu("cuda"), dtype, quant) or "")


def default_threads() -> int:
    """Return how many threads of torch to use at most: its own number, within the usable cores."""
    return min(torch.get_num_threads(), usable_cores())


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Let torch use this many threads in the block; None is as many as `default_threads`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or default_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def name_of(device: torch.device) -> str:
    """Return the name of a device, with the model of a GPU."""
    if device == CPU:
        return "cpu"
    return f"{device} {torch.cuda.get_device_name(device)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, for which torch often raises a plain `RuntimeError`."""
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    is_lack = any(each in text for each in _ALLOCATORS)
    is_lack |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_lack or isinstance(error, MemoryError | torch.OutOfMemoryError)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, including what torch has cached."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def missing_for_cuda_graphs() -> str | None:
    """Name what CUDA graphs lack on this machine, see `meshllm.model.steps.cuda_graph`."""
    if find_spec("triton") is None:
        return "Triton"
    compilers = c_compiler(), which("gcc"), which("clang")  # as Triton looks for one
    return None if any(compilers) else "a C compiler"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without blocking."""
    if device == CPU:
        return x
    with torch.cuda.device(device):  # else pinning would initialise the first GPU
        return x.pin_memory().to(device, non_blocking=True)


def all_to_device(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy CPU tensors [1, T, ...] to a device in one transfer."""
    if device == CPU or len(parts) == 1:
        return [to_device(part, device) for part in parts]
    whole = to_device(torch.cat(list(parts), 1), device)
    return torch.split(whole, [part.shape[1] for part in parts], 1)


def to_host(y: Tensor) -> Tensor:
    """Copy a tensor to the CPU, and wait for it."""
    if y.device == CPU:
        return y
    with torch.cuda.device(y.device):
        own = torch.empty(y.shape, dtype=y.dtype, pin_memory=True)
        own.copy_(y.contiguous(), non_blocking=True)
    wait(y.device)
    return own


def all_to_host(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors [1, T, ...] of one device to the CPU in one transfer, and wait."""
    if len(outputs) == 1 or outputs[0].device == CPU:
        return [to_host(output) for output in outputs]
    whole = to_host(torch.cat(list(outputs), 1))
    return list(torch.split(whole, [output.shape[1] for output in outputs], 1))


def wait(device: torch.device) -> None:
    """Wait until the work of this thread's CUDA stream is done; no-op on the CPU."""
    if device != CPU:
        torch.cuda.current_stream(device).synchronize()


def _is_cpu(wanted: str) -> bool:
    return wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available())


def _gpu(wanted: str) -> torch.device:
    kind, colon, number = wanted.partition(":")
    if kind != "cuda" or (colon and not (number.isdecimal() and len(number) <= 4)):
        raise UserError(
            f"Invalid device `{wanted}`", hint="use `auto`, `cpu`, `cuda`, `cuda:1` and so on"
        )
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"There is no device `{wanted}`: torch {torch.__version__} finds {count or 'no'}"
            f" GPU{'s' * (count > 1)}",
            hint="use `--device cpu`",
        )
    return torch.device("cuda", index)


def _refuse(device: torch.device, dtype: torch.dtype, quant: Quant) -> ModelError | None:
    """Return why a GPU does not support weights in ``dtype`` and ``quant``."""
    if quant is not Quant.NONE:
        return ModelError(
            f"Weights in {quant} run on the CPU only, not on `{device}`",
            hint="use `--device cpu`, or `--quant none`",
        )
    is_older = torch.cuda.get_device_capability(device) < _NATIVE_BFLOAT16
    if dtype == torch.bfloat16 and is_older:
        return ModelError(
            f"`{name_of(device)}` does not support bfloat16",
            hint="use `--device cpu`, or `--dtype float16`",
        )
    return None
