"""Transformer Engine and CUDA's libraries as functions that return at once (null_te.cpp).

On a machine without a GPU, with nvgpu's host runtime, a step then takes the host's own time. Its numbers mean nothing.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("null_te.cpp")


def install():
    """Bind te to these functions, once a process and before its first use. Needs g++."""
    from paddle_te.native import _shim, library

    shim = Path(library.__file__).with_name("shim")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libnull_te.so")
        subprocess.run(["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{shim}", SOURCE, "-o", path], check=True)
        null = ctypes.CDLL(str(path))
    _shim.bind(*[null._handle] * 3)
    library._loaded.update(dict.fromkeys(["cuda", *library.TOOLKIT, *library.OTHERS, "transformer_engine"], null))
    library.driver = lambda: null
