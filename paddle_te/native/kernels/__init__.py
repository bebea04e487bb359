"""Compile our own CUDA kernels at run time by NVRTC, which Transformer Engine needs anyway: no CUDA at build time."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any

from paddle_te.native import library
from paddle_te.native.errors import TransformerEngineError
from paddle_te.native.types import DType

FOLDER = Path(__file__).parent
# What it calls an element type, and how many its Vector has.
ELEMENTS: dict[int, tuple[str, int]] = {
    DType.BFLOAT16: ("bfloat16", 8),
    DType.FLOAT16: ("float16", 8),
    DType.FLOAT32: ("float", 4),
}


def float32_bits(number: float) -> int:
    """Return the bits of a number in float32, as a part of a kernel's parameter of 8 bytes."""
    (bits,) = struct.unpack("I", struct.pack("f", number))
    return int(bits)


@cache
def kernel(name: str, file: str, capability: tuple[int, int], **defines: object) -> Kernel:
    """Return the Kernel `name` of `file` (in this folder), for `_shim.launch`. Call `native.load` first.

    capability: the GPUs' compute capability (major, minor). defines: macros that the file leaves open, to be compiled
    with these only. Raises TransformerEngineError with the compiler's log.
    """
    module, handle = _module(file, capability, **defines), ctypes.c_void_p()
    _check(library.driver().cuLibraryGetKernel(ctypes.byref(handle), module, name.encode()), f"no kernel {name}")
    return Kernel(handle.value or 0, name)


class Kernel(int):
    """The address of a CUkernel, which is shown by its name."""

    name: str

    def __new__(cls, address: int, name: str) -> Kernel:
        kernel = super().__new__(cls, address)
        kernel.name = name
        return kernel

    def __repr__(self) -> str:
        return self.name


@cache
def _module(file: str, capability: tuple[int, int], **defines: object) -> ctypes.c_void_p:
    """Return a CUlibrary, which unlike a CUmodule belongs to no context; kept for the life of the process."""
    image, module = compile_cubin(library.loaded("nvrtc"), file, capability, **defines), ctypes.c_void_p()
    load = library.driver().cuLibraryLoadData
    _check(load(ctypes.byref(module), image, None, None, 0, None, None, 0), f"the driver does not load {file}")
    return module


def compile_cubin(nvrtc: Any, file: str, capability: tuple[int, int], **defines: object) -> bytes:
    """Return `file` compiled to machine code: not to PTX, which a driver older than NVRTC would not take.

    nvrtc: its ctypes.CDLL.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    headers = sorted(FOLDER.glob("*.cuh"))
    names, texts = [path.name.encode() for path in headers], [path.read_bytes() for path in headers]
    strings = ctypes.c_char_p * len(headers)
    given = (FOLDER / file).read_bytes(), file.encode(), len(headers), strings(*texts), strings(*names)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *given), "NVRTC")
    try:
        options = [b"--gpu-architecture=sm_%d%d" % capability, b"--std=c++17"]
        options += [f"-D{name}={value}".encode() for name, value in defines.items()]
        code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            _check(code, f"{file} does not compile for compute capability {capability}:\n{log.value.decode()}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "NVRTC")
        image = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, image), "NVRTC")
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int, what: str) -> None:
    if code:
        raise TransformerEngineError(f"{what} (error {code})")
