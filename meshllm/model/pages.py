"""Advice to the kernel about the memory pages of tensors, on Linux.

A step reads all weights, and a page of 4 KiB takes longer to look up than to read. In pages of
2 MiB, or in cached files of which as much is contiguous, an AMD EPYC of the Zen 4 kind reads
weights up to 1.6 times as fast. Where huge pages are forbidden, in
`/sys/kernel/mm/transparent_hugepage/enabled`, the advice has no effect.
"""

import ctypes
import mmap
import sys
from math import prod

import torch
from torch import Tensor

LEAST = 2 << 20
"""Bytes of a tensor from which on larger pages matter."""

_HUGE_PAGE = 14  # MADV_HUGEPAGE of Linux, which Python defines on some systems only
_PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4, which Python does not define


def prefer_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a tensor that is mapped from a file and not read yet; return it.

    As much of the file is then read at a time.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= LEAST:
        _advise(tensor, _HUGE_PAGE)
    return tensor


def huge_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Make a tensor of zeros, in huge pages of its own if it is large.

    Memory of the heap may have been used before, and its pages do not become larger then.

    Raises:
        MemoryError: there is not enough for a large one; for a small one it is torch's error.
    """
    size = prod(shape) * dtype.itemsize
    if size < LEAST or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None
    return prefer_huge_pages(torch.frombuffer(memory, dtype=dtype).view(shape))


def page_out(tensor: Tensor) -> None:
    """Page out the memory of a mapped tensor; what is read again is paged in."""
    _advise(tensor, _PAGE_OUT)


def _advise(tensor: Tensor, advice: int) -> None:
    if sys.platform != "linux":
        return
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - begin
    advise = ctypes.CDLL(None).madvise
    advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)  # older ones refuse
