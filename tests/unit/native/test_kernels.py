"""All kernels of native/kernels compile for the GPUs that they are for."""

import shutil
import subprocess

import pytest

from paddle_te.native import DType, swiglu
from tests.unit.native.cuda_on_cpu import FOLDER

SWIGLU = FOLDER / "swiglu.cu"
FUNCTIONS = ("SwiGLU", DType.FLOAT8_E4M3), ("DSwiGLU", DType.FLOAT8_E4M3), ("DSwiGLU", DType.FLOAT8_E5M2)


def compile(source, capability, folder, **defines):
    """nvcc's compiler is NVRTC's."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("needs nvcc")
    options = [f"-D{name}={value}" for name, value in defines.items()]
    command = [nvcc, f"-arch=sm_{capability}", *options, "-cubin", source, "-o", folder / "kernel.cubin"]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("source", sorted({*FOLDER.glob("*.cu")} - {SWIGLU}), ids=lambda source: source.stem)
def test_compiles(tmp_path, source, capability):
    compile(source, capability, tmp_path)


@pytest.mark.parametrize("function, float8", FUNCTIONS)
def test_swiglu_compiles(tmp_path, function, float8):
    """For Hopper, and for the GPUs before it that compute in fp8."""
    for capability, dtype, rounded in (
        (89, DType.BFLOAT16, False),
        (90, DType.BFLOAT16, True),
        (90, DType.FLOAT16, False),
    ):
        defines = swiglu.defines(function, dtype, float8, rounded, swiglu.TILINGS[function])
        compile(SWIGLU, capability, tmp_path, **defines)
