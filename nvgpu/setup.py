"""Compiles the plug-in while it is installed, for the Paddle that the same environment has: pip install ./nvgpu

The host runtime always, and the CUDA runtime where nvcc is found. NVGPU_RUNTIMES=host, or host,cuda, says which.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build as plugin  # noqa: E402  (build.py beside this file)

# The host runtime is loaded when CUSTOM_DEVICE_ROOT names its folder: else every process of this Python would compute
# on it, because Paddle prefers a device. The CUDA runtime lies where Paddle looks by itself.
FOLDERS = {"host": "nvgpu/host", "cuda": "paddle_custom_device"}


def runtimes() -> list[str]:
    said = os.environ.get("NVGPU_RUNTIMES")
    if said is None:
        return [name for name in plugin.RUNTIMES if name == "host" or plugin.find_nvcc()]
    names = said.split(",")
    if not set(names) <= set(plugin.RUNTIMES):
        sys.exit(f"nvgpu: NVGPU_RUNTIMES={said} must be host, cuda or host,cuda")
    return names


def requirements() -> list[str]:
    """Return exactly the Paddle that this is compiled for: pip then says it when another one replaces it."""
    found = sorted(plugin.paddle_directory().parent.glob("paddlepaddle*.dist-info"))
    return ["==".join(path.stem.split("-")) for path in found[:1]]


class CompilePlugin(build_py):
    def run(self) -> None:
        if self.editable_mode:
            sys.exit("nvgpu: libraries are compiled and copied, so -e cannot work: pip install ./nvgpu")
        super().run()
        for name, folder in FOLDERS.items():
            target = Path(self.build_lib, folder)
            shutil.rmtree(target, ignore_errors=True)  # of another build
            if name in runtimes():
                self.compile_runtime(name, target)

    def compile_runtime(self, name: str, target: Path) -> None:
        try:
            built = plugin.build(name)
        except RuntimeError as error:
            remedy = ", or leave it out: NVGPU_RUNTIMES=host pip install ./nvgpu" if name == "cuda" else ""
            sys.exit(f"nvgpu: the {name} runtime could not be compiled{remedy}\n{error}")
        (target / "plugin").mkdir(parents=True)
        for library in ("libnvgpu.so", f"plugin/libnvgpu_{name}.so"):
            shutil.copy2(built / library, target / library)


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=BinaryDistribution, cmdclass={"build_py": CompilePlugin}, install_requires=requirements())
