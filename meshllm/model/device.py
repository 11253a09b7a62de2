"""Where a model computes, and the way there and back.

Theory of operation: a GPU works behind the back of the program that feeds it. So the rows of a job
go there once, from pinned memory and without a wait; what computes them is queued behind that; and
what they give comes back once, which is the only wait. torch keeps the pinned memory for the next
job, and hands a piece of it out again only when the copy from it is done. On the CPU nothing is
copied, and nobody waits.
"""

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from shutil import which

import torch
from torch import Tensor

from meshllm.errors import ModelError, UserError
from meshllm.names import Quant

CPU = torch.device("cpu")

_NATIVE_BFLOAT16 = (8, 0)  # compute capability; older ones take the steps of float32 for it

logger = logging.getLogger(__name__)


def choose(wanted: str, dtype: torch.dtype, quant: Quant = Quant.NONE) -> torch.device:
    """Find the device that is wanted: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    ``auto`` is the first GPU where it can hold weights so, else the CPU.

    Raises:
        UserError: there is no such device.
        ModelError: it cannot hold weights so.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CPU
    device = _gpu("cuda" if wanted == "auto" else wanted)
    refusal = _refuse(device, dtype, quant)
    if refusal is None:
        logger.info("computing on %s", name_of(device))
        return device
    if wanted != "auto":
        raise refusal
    logger.info("computing on the CPU: %s", refusal)
    return CPU


def name_of(device: torch.device) -> str:
    """Name a device and what it is."""
    if device == CPU:
        return "cpu"
    return f"{device} {torch.cuda.get_device_name(device)}"


def free_bytes(device: torch.device) -> int:
    """Tell how much memory of a GPU is free; what torch has kept for later is."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def lacks() -> str | None:
    """Name what is missing to launch steps on a GPU, see `meshllm.model.steps.cuda_graph`."""
    if find_spec("triton") is None:
        return "Triton"
    compilers = os.environ.get("CC"), which("gcc"), which("clang")  # as Triton looks for one
    return None if any(compilers) else "a C compiler"


def put(x: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor of the CPU to a device, without a wait."""
    if device == CPU:
        return x
    with torch.cuda.device(device):  # or pinning would wake the first GPU for another one
        return x.pin_memory().to(device, non_blocking=True)


def put_all(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Bring tensors [1, T, ...] to a device in one piece."""
    if device == CPU or len(parts) == 1:
        return [put(part, device) for part in parts]
    whole = put(torch.cat(list(parts), 1), device)
    return torch.split(whole, [part.shape[1] for part in parts], 1)


def fetch(y: Tensor) -> Tensor:
    """Wait for a tensor, and bring it to the CPU."""
    if y.device == CPU:
        return y
    with torch.cuda.device(y.device):
        own = torch.empty(y.shape, dtype=y.dtype, pin_memory=True)
        own.copy_(y.contiguous(), non_blocking=True)
    wait(y.device)
    return own


def fetch_all(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Wait for tensors [1, T, ...] of one device, and bring them to the CPU in one piece."""
    if len(outputs) == 1 or outputs[0].device == CPU:
        return [fetch(output) for output in outputs]
    whole = fetch(torch.cat(list(outputs), 1))
    return list(torch.split(whole, [output.shape[1] for output in outputs], 1))


def wait(device: torch.device) -> None:
    """Wait until this thread's work on a device is done; on the CPU it is."""
    if device != CPU:
        torch.cuda.current_stream(device).synchronize()


def _gpu(wanted: str) -> torch.device:
    kind, colon, number = wanted.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise UserError(
            f"`{wanted}` is no device", hint="one of `auto`, `cpu`, `cuda`, `cuda:1` and so on"
        )
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"`{wanted}` is not here: torch {torch.__version__} sees {count or 'no'}"
            f" GPU{'s' * (count > 1)}",
            hint="use `--device cpu`",
        )
    return torch.device("cuda", index)


def _refuse(device: torch.device, dtype: torch.dtype, quant: Quant) -> ModelError | None:
    """Say why a GPU cannot hold weights so."""
    if quant is not Quant.NONE:
        return ModelError(
            f"Weights in {quant} are for processors, not for `{device}`",
            hint="use `--device cpu`, or `--quant none`",
        )
    is_older = torch.cuda.get_device_capability(device) < _NATIVE_BFLOAT16
    if dtype == torch.bfloat16 and is_older:
        return ModelError(
            f"`{name_of(device)}` does not compute in bfloat16",
            hint="use `--device cpu`, or `--dtype float16`",
        )
    return None
