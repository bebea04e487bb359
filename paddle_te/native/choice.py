"""The user's choice of CUDA libraries: folders in PADDLE_TE_CUDA_LIBRARIES.

LD_LIBRARY_PATH is no such choice: environment modules and containers set it to a whole toolkit, so that it would
replace the `nvidia` packages that Paddle was installed with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from paddle_te.native.errors import Problem

VARIABLE = "PADDLE_TE_CUDA_LIBRARIES"  # nvgpu/csrc/libraries.h reads it, too


def folders() -> list[str]:
    """Return the folders that the user names; [] without a choice."""
    return [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


def chosen(soname: str) -> str | None:
    """Return the path of the library of that SONAME in the first chosen folder that holds it, or None."""
    paths = (os.path.join(folder, soname) for folder in folders())
    return next((path for path in paths if os.path.isfile(path)), None)


def problems(sonames: Sequence[str], present: Mapping[str, Sequence[str]]) -> list[Problem]:
    """Return why the choice cannot be followed.

    sonames: of the libraries that are needed. present: the paths of those that this process has, by SONAME.
    """
    found = []
    for folder in folders():
        if not any(os.path.isfile(os.path.join(folder, soname)) for soname in sonames):
            what = f"{VARIABLE} names {folder}, which holds none of {', '.join(sonames)}"
            found.append(Problem(what, "give the folder of the lib*.so.N files themselves, or unset the variable"))
    for soname in sonames:
        path, loaded = chosen(soname), present.get(soname, [])
        if path and loaded and os.path.realpath(path) not in loaded:
            what = f"{VARIABLE} chooses {path}, but this process has already loaded {', '.join(loaded)}"
            remedy = "set the variable before the program starts; where Paddle itself loads it, update that package"
            found.append(Problem(what, remedy))
    return found


def apart(paths: Mapping[str, Sequence[str]]) -> list[Problem]:
    """Return the problem of a cuBLAS and a cuBLASLt that lie in different folders: they belong to one release.

    paths: those of the loaded libraries, by name.
    """
    both = [path for name in ("cublas", "cublasLt") for path in paths.get(name, [])]
    if len({os.path.dirname(path) for path in both}) <= 1:
        return []
    remedy = f"set {VARIABLE} to a folder that holds both, or remove the other copy"
    return [Problem(f"libcublas and libcublasLt come from different places: {', '.join(both)}", remedy)]
