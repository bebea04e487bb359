"""All kernels of native/kernels compile for the GPUs that they are for."""

import shutil
import subprocess

import pytest

from paddle_te.native import DType, casts, experts, rmsnorm, swiglu
from paddle_te.native.casts import Form
from tests.unit.native.cuda_on_cpu import FOLDER

CASTS = {  # by their files: the kernel's name, its tiling, and what else the file is compiled with
    "swiglu.cu": [
        ("swiglu", swiglu.TILINGS["SwiGLU"], dict(FUNCTION="SwiGLU", STORED=0, PLAIN=0, AGAIN=0)),
        ("swiglu", swiglu.TILINGS["SwiGLU"], dict(FUNCTION="SwiGLU", STORED=1, PLAIN=0, AGAIN=0)),
        ("dswiglu", swiglu.TILINGS["DSwiGLU"], dict(FUNCTION="DSwiGLU", STORED=2, PLAIN=1, AGAIN=1)),
        ("dswiglu", swiglu.TILINGS["DSwiGLU"], dict(FUNCTION="DSwiGLU", STORED=0, PLAIN=0, AGAIN=0, STATISTICS=1)),
    ],
    "experts_cast.cu": [("experts_cast", experts.CAST_TILING, more) for more in ({}, dict(STATISTICS=1))],
    "experts_swiglu.cu": [
        ("experts_swiglu", experts.SWIGLU_TILING, dict(GRADIENT=0)),
        ("experts_dswiglu", experts.DSWIGLU_TILING, dict(GRADIENT=1, STATISTICS=1)),
        ("experts_dswiglu", experts.DSWIGLU_TILING, dict(GRADIENT=1)),
        ("experts_dswiglu", experts.DSWIGLU_TILING, dict(GRADIENT=1, STATISTICS=1)),
    ],
    "cast.cu": [
        ("cast", casts.CAST_TILING, more)
        for more in (dict(MATRICES=1), dict(MATRICES=2), dict(MATRICES=1, STATISTICS=1))
    ],
    "rmsnorm_cast.cu": [("rmsnorm", rmsnorm.CAST_TILING, more) for more in ({}, dict(PLAIN=1, STATISTICS=1))],
    "block_statistics.cu": [("blocks", casts.CAST_TILING, dict(SQUARE=square)) for square in (0, 1)],
}

STATISTICS, MXFP8, LOW_RANK = "rmsnorm_statistics.cu", "mxfp8.cu", "low_rank.cu"
ROTATING = ["latent.cu", "qk_norm.cu", "rope.cu", "rotation_cast.cu"]


def compile(source, capability, folder, **defines):
    """nvcc's compiler is NVRTC's."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("needs nvcc")
    options = [f"-D{name}={value}" for name, value in defines.items()]
    quickly = ["-Xcicc", "-O0", "-Xptxas", "-O0"]  # nobody runs them
    command = [nvcc, f"-arch=sm_{capability}", *quickly, *options, "-cubin", source, "-o", folder / "kernel.cubin"]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "file", sorted({path.name for path in FOLDER.glob("*.cu")} - {*CASTS, *ROTATING, STATISTICS, MXFP8, LOW_RANK})
)
def test_compiles(tmp_path, file, capability):
    compile(FOLDER / file, capability, tmp_path)


@pytest.mark.parametrize("capability, run", [(80, 1), (90, 8)])
def test_low_rank_products_compile(tmp_path, capability, run):
    compile(FOLDER / LOW_RANK, capability, tmp_path, RUN=run)


@pytest.mark.parametrize("interleaved, over_all", [(0, 0), (1, 1)])
@pytest.mark.parametrize("file", ROTATING)
def test_rotations_compile(tmp_path, file, interleaved, over_all):
    for capability in (89 if "cast" in file else 80, 90):
        compile(FOLDER / file, capability, tmp_path, INTERLEAVED=interleaved, OVER_ALL=over_all, NORM=1 - over_all)


@pytest.mark.parametrize("file, name, tiling, more", [(file, *cast) for file in CASTS for cast in CASTS[file]])
def test_casts_compile(tmp_path, file, name, tiling, more):
    """For Hopper, and for the GPUs before it that compute in fp8."""
    for capability, form in (
        (89, Form(DType.BFLOAT16, DType.FLOAT8_E4M3)),
        (90, Form(DType.BFLOAT16, DType.FLOAT8_E5M2, True)),
        (90, Form(DType.FLOAT16, DType.FLOAT8_E4M3)),
    ):
        compile(FOLDER / file, capability, tmp_path, **form.defines(name, tiling), **more)


@pytest.mark.parametrize("hidden, element", [(2048, "float16"), (4096, "bfloat16")])
def test_statistics_compile(tmp_path, hidden, element):
    for capability in (89, 90):
        defines = dict(NAME="statistics", HIDDEN=hidden, WARPS=rmsnorm.WARPS[hidden], ELEMENT=element)
        compile(FOLDER / STATISTICS, capability, tmp_path, **defines)


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_mxfp8_compiles(tmp_path, element):
    """For the GPUs that have fp8."""
    for capability in (89, 90):
        compile(FOLDER / MXFP8, capability, tmp_path, ELEMENT=element)
