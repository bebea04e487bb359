"""Package paddle_te. Ranges that work stand here, exact versions in constraints.txt."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

REQUIRES = [
    "numpy>=1.24,<3",
    "safetensors",
    "psutil",
    "tqdm",
    "shtab>=1.7,<2",
    "xxhash>=3",
    "tokenizers>=0.20",
    "protobuf>=4.22",  # reads sentencepiece models
]

# A host is an extra, since the two exclude each other's versions: each needs an environment of its own.
HOSTS = {
    # PaddleNLP 3.0.0b4 does not import with newer huggingface_hub, aistudio_sdk, datasets and pyarrow.
    "paddlenlp": [
        "paddlenlp>=3.0.0b4,<3.0.1",
        "visualdl>=2.5.3,<3",
        "regex",
        "huggingface_hub>=0.25,<0.26",
        "aistudio_sdk>=0.2,<0.3",
        "datasets>=2.21,<3",
        "pyarrow>=15,<18",
        "protobuf>=3.20.2,<7",
        "numpy<2",
        "fast_dataindex",
        "sentencepiece",
        "jinja2>=3.1.6,<4",
    ],
    # datasets 5 requires pyarrow 24, which needs NumPy 2; fast_dataindex, which PaddleFormers requires, needs NumPy 1.
    "paddleformers": ["paddleformers>=1.2,<1.3", "datasets<5", "pyarrow<24", "numpy<2"],
}

# Paddle itself is an extra: paddlepaddle and paddlepaddle-gpu install the same files, so requiring one would break
# the other. `pip install '.[cpu,paddlenlp]'` takes the CPU wheel; with paddlepaddle-gpu install that first, and then
# `.[paddlenlp]`.
EXTRAS = {
    **HOSTS,
    "cpu": ["paddlepaddle>=3.3,<3.4"],
    "data": ["zstandard"],
    "plots": ["matplotlib"],
    # paddle-te evaluate --lm_eval. Since 0.4.10 it needs neither PyTorch nor transformers itself. No underscore in the
    # extra's name: setuptools makes it a hyphen, and older pips do not find it then.
    "harness": ["lm_eval>=0.4.10,<0.5"],
    # With the CUDA libraries that it loads; the `nvidia` packages of paddlepaddle-gpu or a toolkit serve as well.
    "te-cu12": [
        "transformer-engine-cu12>=2.20,<2.21",
        "nvidia-cublas-cu12",
        "nvidia-cuda-nvrtc-cu12",
        "nvidia-cuda-runtime-cu12",
        "nvidia-cudnn-cu12>=9.12,<10",
        "nvidia-nccl-cu12",
    ],
    "te-cu13": [
        "transformer-engine-cu13>=2.20,<2.21",
        "nvidia-cublas>=13,<13.7",  # 13.7 corrupts numbers on newer chips
        "nvidia-cuda-nvrtc>=13,<14",
        "nvidia-cuda-runtime>=13,<14",
        "nvidia-cudnn-cu13>=9.12,<10",
        "nvidia-nccl-cu13",
    ],
    # What pip install ./nvgpu compiles its CUDA runtime with, where no CUDA 13 toolkit is installed.
    "nvgpu": ["nvidia-cuda-nvcc>=13,<14", "nvidia-cuda-cccl>=13,<14"],
    # nvtx: named ranges for nsys. CUPTI: kernels on nvgpu for Paddle's own profiler.
    "profile": ["nvtx", "nvidia-cuda-cupti>=13,<14"],
}
# What --report_to may name beside visualdl. mlflow, the whole, keeps runs in a database, too.
EXTRAS["trackers"] = ["wandb>=0.17,<1", "swanlab>=0.6,<1", "tensorboardX>=2.6,<3", "mlflow-skinny>=3,<4"]
# `mkdocs serve` and `mkdocs build --strict` with mkdocs.yml.
EXTRAS["docs"] = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.30,<2"]
EXTRAS["test"] = [
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.100,<7",
    "codespell>=2.3,<3",
    "ruff",
    "clang-format",
    "mypy",
    "types-psutil",
    "pybind11>=2.12",
    "setuptools>=70.1",  # makes wheels without the package wheel
    "build",
    "twine",
    "auditwheel>=6,<7",  # with pyelftools, which tests/exports.py reads libraries with
    *EXTRAS["data"],
    *EXTRAS["plots"],
    *EXTRAS["docs"],
    *EXTRAS["trackers"],
]

SHIM_EXPORTS = "paddle_te/native/shim.map"

setup(
    name="paddle_te",
    version="0.2.0",
    description="Transformer Engine for PaddlePaddle, PaddleNLP and PaddleFormers: one switch chooses decoder layers",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    entry_points={"console_scripts": ["paddle-te = paddle_te.__main__:main"]},
    packages=find_packages(include=["paddle_te", "paddle_te.*"]),
    package_data={
        "paddle_te": [
            "configs/**/*",
            "planner/*.json",
            "recipes/*.json",
            "native/*.cpp",
            "native/*.map",
            "native/shim/*.h",
            "native/kernels/*.cu",
            "native/kernels/*.cuh",
        ]
    },
    # Plain C++: the shim finds Transformer Engine at run time, so neither CUDA nor TE nor Paddle is needed to build it.
    ext_modules=[
        Pybind11Extension(
            "paddle_te.native._shim",
            ["paddle_te/native/shim.cpp"],
            depends=[SHIM_EXPORTS, *(str(header) for header in Path("paddle_te/native/shim").glob("*.h"))],
            extra_link_args=[f"-Wl,--version-script={SHIM_EXPORTS}"],
            libraries=["dl"],
            cxx_std=17,
        )
    ],
    install_requires=REQUIRES,
    extras_require=EXTRAS,
)
