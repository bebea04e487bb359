"""Models from checkpoint folders."""

from contextlib import contextmanager
from pathlib import Path

import paddle
from paddlenlp.transformers import LlamaConfig

from paddle_te import device
from paddle_te.checkpoint import CheckpointError, check_layout
from paddle_te.llama.modeling import model_class
from paddle_te.ops import get_ops

DTYPES = ("float32", "bfloat16", "float16")


def check_backend(backend, dtype, fp8=False):
    """Raises ValueError or native.BackendUnavailable for a backend or dtype that this device cannot run."""
    model_class(backend)  # refuses what it does not know
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: it may be {', '.join(DTYPES)}")
    if dtype != "float32" and not device.bf16_supported():
        raise ValueError(f"dtype {dtype}: Paddle has no kernels for it on this device; use float32")
    if fp8 and backend == "none":
        raise ValueError("fp8 needs backend transformer_engine (or paddle, emulated)")
    if backend != "none":
        get_ops(backend).check(fp8=fp8)


@contextmanager
def _no_views():
    """While it lasts, slices are copies: Tensor.set_value copies a view from the host to a custom device without its
    strides (Paddle 3.3.1), and PaddleNLP splits weights over tensor parallel ranks by slicing."""
    flag = "FLAGS_use_stride_kernel"
    kept = paddle.get_flags(flag)
    paddle.set_flags({flag: False})
    try:
        yield
    finally:
        paddle.set_flags(kept)


def from_pretrained(model_class, folder, config, dtype):
    """model_class(config) with the weights in `folder`. Raises CheckpointError where PaddleNLP would only warn."""
    check_layout(folder, "native" if config.transformer_engine_backend == "none" else "te")
    with _no_views():
        return model_class.from_pretrained(str(folder), config=config, dtype=dtype)


def load_config(folder, backend="none", **settings):
    """The LlamaConfig of the checkpoint in `folder` for a run with `backend`; settings override it.

    Raises FileNotFoundError, ValueError for an unknown backend, CheckpointError (a ValueError) for an unfit folder: the
    layout must be the backend's.
    """
    model_class(backend)  # refuses what it does not know
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of a checkpoint")
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json")
    check_layout(folder, "native" if backend == "none" else "te")
    config = LlamaConfig.from_pretrained(str(folder))
    # a checkpoint of another run brings that run's flags along
    own = dict(transformer_engine_backend=backend, use_fp8=False, sequence_parallel=False, tensor_parallel_degree=1)
    for name, value in {**own, **settings}.items():
        setattr(config, name, value)
    return config


def load_model(folder, backend="none", dtype="float32", **settings):
    """LlamaForCausalLM with the weights in `folder`, in evaluation mode. Raises what the two functions above raise."""
    check_backend(backend, dtype, settings.get("use_fp8", False))
    config = load_config(folder, backend, **settings)
    model = from_pretrained(model_class(backend), folder, config, dtype)
    model.eval()
    return model
