"""Loads machine code that LLVM compiled in an earlier process, without LLVM.

LLVM's library takes 45 MB of memory, and each kernel that it loads some more. The code of a kernel
is an object file of a few KB: one function, its constants, and places that hold the address of a
constant. On Linux on x86-64 it is copied into memory, with these places filled in. Object
files with anything else, and other systems, are left to LLVM.
"""

import ctypes
import mmap
import struct
from dataclasses import dataclass
from typing import NamedTuple, Self

from meshllm.model.hardware import make_executable

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # of ELF64; see `man 5 elf`
_IDENT = b"\x7fELF\x02\x01"  # 64 bits, the lowest byte first
_RELOCATABLE, _X86_64 = 1, 62
_SYMBOL = struct.Struct("<IBBHQQ")
_GLOBAL_FUNCTION = 0x12
_RELOCATION = struct.Struct("<QQq")
_ADDRESS_64 = 1  # R_X86_64_64
_PROGBITS, _SYMTAB, _RELA, _UNWIND = 1, 2, 4, 0x70000001
_WRITE, _ALLOC = 1, 2  # flags of sections


class _Section(NamedTuple):
    """The header of a section."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


_SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True, slots=True)
class LoadedCode:
    """A function in executable memory, which is freed with this object."""

    memory: mmap.mmap
    address: int


@dataclass(frozen=True, slots=True)
class CodeImage:
    """A function and its constants, as they lie in memory."""

    content: bytes
    entry: int
    """Offset of the function."""
    pointers: tuple[tuple[int, int], ...]
    """Offsets of places that hold an address, each with the offset that it refers to."""

    @classmethod
    def of(cls, code: bytes) -> Self | None:
        """Lay out the sections of an object file; None if it has more than this module loads."""
        if not code.startswith(_IDENT):
            return None
        _, kind, processor, _, _, _, first, *_, size, count, _ = _HEADER.unpack_from(code)
        if (kind, processor) != (_RELOCATABLE, _X86_64):
            return None
        headers = range(first, first + count * size, size)
        sections = [_Section(*_SECTION.unpack_from(code, at)) for at in headers]
        laid = _lay_out(code, sections)
        pointers = laid and _pointers(code, sections, laid[1])
        if laid is None or pointers is None:
            return None
        content, starts = laid
        entries = [
            starts[index] + value
            for section in sections
            if section.type == _SYMTAB
            for _, info, _, index, value, _ in _SYMBOL.iter_unpack(_body(code, section))
            if info == _GLOBAL_FUNCTION and index in starts
        ]
        return cls(content, entries[0], pointers) if len(entries) == 1 else None

    def load(self) -> LoadedCode | None:
        """Copy the code into memory; None if the system forbids executing it."""
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, len(self.content), flags=private)
        memory.write(self.content)
        base = _address(memory)
        for at, target in self.pointers:
            struct.pack_into("<Q", memory, at, base + target)
        return LoadedCode(memory, base + self.entry) if make_executable(memory) else None


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _body(code: bytes, section: _Section) -> bytes:
    return code[section.offset : section.offset + section.size]


def _lay_out(code: bytes, sections: list[_Section]) -> tuple[bytes, dict[int, int]] | None:
    """Return what goes into memory, and the offset of each section in it.

    None if there are variables. Tables for exceptions are left out: no kernel raises one.
    """
    content, starts = bytearray(), dict[int, int]()
    for number, section in enumerate(sections):
        if not section.flags & _ALLOC or section.type == _UNWIND:
            continue
        if section.type != _PROGBITS or section.flags & _WRITE or section.align > mmap.PAGESIZE:
            return None
        content += bytes(-len(content) % max(1, section.align))
        starts[number] = len(content)
        content += _body(code, section)
    return bytes(content), starts


def _pointers(
    code: bytes, sections: list[_Section], starts: dict[int, int]
) -> tuple[tuple[int, int], ...] | None:
    """Return the places that hold an address; None if one is not of a constant, or relative."""
    pointers = list[tuple[int, int]]()
    for section in sections:
        if section.type != _RELA or section.info not in starts:
            continue
        symbols = sections[section.link].offset
        for offset, info, addend in _RELOCATION.iter_unpack(_body(code, section)):
            at = symbols + _SYMBOL.size * (info >> 32)
            _, _, _, index, value, _ = _SYMBOL.unpack_from(code, at)
            if info & 0xFFFFFFFF != _ADDRESS_64 or index not in starts:
                return None
            pointers.append((starts[section.info] + offset, starts[index] + value + addend))
    return tuple(pointers)
