"""The heads of multi-head latent attention, from what its projections give: an Op of one kernel in each direction."""

from __future__ import annotations

from dataclasses import dataclass

from paddle import Tensor

from paddle_te.native import latent
from paddle_te.ops.heads import LatentHeads
from paddle_te.ops.te import autograd
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, Recorder
from paddle_te.ops.te.rotation import rows_of_angles
from paddle_te.ops.te.runtime import check_tensor, dtype_code


@dataclass(slots=True)
class _Saved:
    """Hold what backward reads: the inputs' shapes and stop_gradient, and the angles."""

    inputs: tuple[Placeholder, Placeholder, Placeholder]
    freqs: Placeholder
    sizes: latent.Latent


def _sizes(
    q: Placeholder, kv: Placeholder, position: Placeholder, freqs: Placeholder, heads: LatentHeads
) -> latent.Latent:
    """Return the kernels' sizes. Raises TypeError or ValueError for tensors that do not fit each other."""
    code, (b, s, turned) = dtype_code("position", position), position.shape
    count, plain, value = heads.num_heads, heads.plain, heads.value
    check_tensor("q", q, [b, s, count * (plain + turned)], position.dtype)
    check_tensor("kv", kv, [b, s, count * (plain + value)], position.dtype)
    if freqs.shape[-1] != turned:
        raise ValueError(f"angles {list(freqs.shape)} for keys of which {turned} numbers are rotated")
    rows = rows_of_angles(freqs, b, s)
    of_heads = count, plain, turned, value, code, heads.interleaved, heads.rotary_factor
    return latent.Latent(b * s, rows, *of_heads)


def _forward(rt: Recorder, inputs: OpInputs, heads: LatentHeads) -> tuple[tuple[Placeholder, ...], _Saved]:
    q, kv, position, freqs = inputs.tensors
    sizes, (b, s, _) = _sizes(q, kv, position, freqs, heads), position.shape
    key = sizes.plain + sizes.turned
    outputs = tuple([rt.empty([b, s, heads.num_heads, width], q.dtype) for width in (key, key, sizes.value)])
    source, target = _addresses((q, kv, position)), _addresses(outputs)
    latent.forward(rt.te, rt.stream, source, target, freqs.data_ptr(), sizes)
    return outputs, _Saved((q, kv, position), freqs, sizes)


def _backward(
    rt: Recorder, saved: _Saved, dq: Placeholder, dk: Placeholder, dv: Placeholder
) -> tuple[Placeholder | None, ...]:
    gradients = tuple([rt.empty(tensor.shape, tensor.dtype) for tensor in saved.inputs])
    source, target = _addresses((dq, dk, dv)), _addresses(gradients)
    latent.backward(rt.te, rt.stream, source, target, saved.freqs.data_ptr(), saved.sizes)
    pairs = zip(saved.inputs, gradients, strict=True)
    return *[None if tensor.stop_gradient else gradient for tensor, gradient in pairs], None


def _addresses(tensors: tuple[Placeholder, ...]) -> tuple[int, int, int]:
    first, second, third = (tensor.data_ptr() for tensor in tensors)
    return first, second, third


_LATENT_QKV = Op(_forward, _backward)


def latent_qkv(
    q: Tensor, kv: Tensor, position: Tensor, freqs: Tensor, heads: LatentHeads
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projections of latent attention into heads and rotate: see `ops.interface`."""
    return autograd.apply(_LATENT_QKV, (q, kv, position, freqs), heads)
