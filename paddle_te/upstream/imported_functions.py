"""Replace a C function that a loaded library imports by a Python function for a while.

A library calls the functions of others through a table of addresses that the dynamic loader fills (ELF's jump slots,
man 5 elf). This writes another address there. Only for calls from threads that may take Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator, Mapping
from typing import Any

_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_RELA = struct.Struct("<QQq")  # Elf64_Rela
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
SHT_RELA, R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT = 4, 7, 1026


def _slot(path: str, name: bytes) -> int | None:
    """Return the offset of a function's jump slot from where the library is loaded; None where it has none."""
    with open(path, "rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        at, count = struct.unpack("<Q", read(40, 8))[0], struct.unpack("<H", read(60, 2))[0]
        sections = [_SECTION.unpack(read(at + i * _SECTION.size, _SECTION.size)) for i in range(count)]
        for _, kind, _, _, offset, size, link, *_ in sections:
            if kind != SHT_RELA:
                continue
            symbols, names = sections[link], sections[sections[link][6]]
            jumps = [
                (place, info >> 32)
                for place, info, _ in _RELA.iter_unpack(read(offset, size))
                if info & 0xFFFFFFFF in (R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT)
            ]
            if not jumps:
                continue
            table, text = read(symbols[4], symbols[5]), read(names[4], names[5])
            for place, symbol in jumps:
                start = _SYMBOL.unpack_from(table, symbol * _SYMBOL.size)[0]
                if text[start : text.index(b"\0", start)] == name:
                    return place
    return None


def _loaded_at(library: str) -> tuple[int, str] | None:
    """Return where this process has a library whose file has this name, and its path."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[5].strip().endswith(f"/{library}") and int(words[2], 16) == 0:
                return int(words[0].partition("-")[0], 16), words[5].strip()
    return None


@contextlib.contextmanager
def replaced(library: str, functions: Mapping[str, Any]) -> Iterator[None]:
    """Let the library's calls of these functions go to the given ones, within the context.

    Args:
        library: name of its file.
        functions: by name; made by ctypes.CFUNCTYPE.

    Raises RuntimeError where the library is not loaded or imports no such function.
    """
    loaded = _loaded_at(library)
    if loaded is None:
        raise RuntimeError(f"{library} is not loaded")
    base, path = loaded
    slots = {}
    for name in functions:
        offset = _slot(path, name.encode())
        if offset is None:
            raise RuntimeError(f"{path} does not call {name}")
        slots[name] = ctypes.c_void_p.from_address(base + offset)
    before = {name: slot.value for name, slot in slots.items()}
    try:
        for name, function in functions.items():
            slots[name].value = ctypes.cast(function, ctypes.c_void_p).value
        yield
    finally:
        for name, slot in slots.items():
            slot.value = before[name]
