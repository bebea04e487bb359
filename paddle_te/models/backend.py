"""Which backend a model's decoder layers compute with, and whether this device can run it."""

from typing import Any

from paddle_te import device
from paddle_te.ops import get_ops
from paddle_te.ops.interface import Ops
from paddle_te.options import BACKENDS, DTYPES


def ops_of(config: Any) -> Ops:
    """Return the functions of the backend that a model's configuration names."""
    return get_ops(config.transformer_engine_backend)


def is_native(config: Any) -> bool:
    """Return whether a model's decoder layers are the host's own."""
    return bool(config.transformer_engine_backend == "none")


def is_te(config: Any) -> bool:
    """Return whether a model's decoder layers compute on Transformer Engine."""
    return bool(config.transformer_engine_backend == "transformer_engine")


def backend_of_ours(config: Any) -> str:
    """Return the backend of what is ours beside a model's decoder layers, such as its loss: under "none" it is pd."""
    return "paddle" if is_native(config) else str(config.transformer_engine_backend)


def check_backend_name(backend: str) -> None:
    """Raise ValueError for a --transformer_engine_backend that there is not."""
    if backend not in BACKENDS.values():
        raise ValueError(f"transformer_engine_backend={backend!r}; it may be one of {', '.join(BACKENDS.values())}")


def check_backend(backend: str, dtype: str, fp8: bool = False) -> None:
    """Raise ValueError or native.BackendUnavailable for a backend or dtype that this device cannot run."""
    check_backend_name(backend)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: it may be {', '.join(DTYPES)}")
    if dtype != "float32" and not device.bf16_supported():
        raise ValueError(f"dtype {dtype}: Paddle has no kernels for it on this device; use float32")
    if fp8 and backend == "none":
        raise ValueError("fp8 needs backend transformer_engine (or paddle, emulated)")
    if backend != "none":
        get_ops(backend).check(fp8=fp8)
    if dtype == "float32" and backend == "transformer_engine":
        raise ValueError("dtype float32: backend transformer_engine computes in bfloat16, float16 and fp8 only")
