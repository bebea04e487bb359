"""`layernorm_mlp` with low-rank products beside its GEMMs, as an Op: see paddle_te.ops.te.recording.

As in `linear.NormedLowRankLinear` norm and activation write 16 bits, and fp8 is rounded from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle_te.ops.te.activation import ActivationGradient, activated_in_both, activation_backward_in_both
from paddle_te.ops.te.gemm import Gemm, check_fp8, row_count
from paddle_te.ops.te.input_store import StoredInput
from paddle_te.ops.te.linear import (
    ROW,
    NormedLowRankLinear,
    RecordedLowRank,
    SavedLowRankLinear,
    Wanted,
    low_rank_linear_forward,
)
from paddle_te.ops.te.mlp_settings import MLPSettings
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, Recorder
from paddle_te.ops.te.runtime import Matrix, dtype_code


class _Fc1(NamedTuple):
    """fc1's output, as the activation's backward reads it, and what fc1's own reads."""

    out: Matrix | StoredInput
    saved: NormedLowRankLinear


def _fc1_forward(
    rt: Recorder, inputs: OpInputs, settings: MLPSettings, copies: bool = False
) -> tuple[Matrix, NormedLowRankLinear]:
    """Return what an _Fc1 has. copies: `column_forward`'s."""
    low_rank, _ = _low_ranks(inputs, settings)
    out, saved = NormedLowRankLinear.forward(rt, inputs, settings.norm, low_rank, copies)
    return rt.matrix(out, saved.norm.code), saved


@dataclass(slots=True)
class _Saved:
    """fc1, act: None where backward computes it again. act: the activation's output. fc2: what its backward reads."""

    inputs: OpInputs
    settings: MLPSettings
    fc1: _Fc1 | None
    act: Placeholder | None
    fc2: SavedLowRankLinear


def _low_ranks(inputs: OpInputs, settings: MLPSettings) -> tuple[RecordedLowRank, RecordedLowRank]:
    """Return (fc1's, fc2's) product."""
    factors = inputs.tensors[7:]
    count = 2 * len(settings.fc1.sizes) if settings.fc1 else 0
    return RecordedLowRank(settings.fc1, factors[:count]), RecordedLowRank(settings.fc2, factors[count:])


def _forward(rt: Recorder, inputs: OpInputs, settings: MLPSettings) -> tuple[Any, _Saved]:
    x, weight = inputs.tensors[0], inputs.tensors[5]
    check_fp8(inputs.quantizers[0], tokens=row_count(x), hidden_size=x.shape[-1], ffn_hidden_size=weight.shape[1])
    code, again = dtype_code("x", x), settings.recompute.part
    hidden, of_fc1 = _fc1_forward(rt, inputs, settings, copies=settings.add_residual)
    store = StoredInput(rt, hidden, code) if settings.stores_input and inputs.train else None
    second, wgrad = inputs.quantizers[1], inputs.train and not weight.stop_gradient
    matrix, quantized = activated_in_both(rt, hidden, code, second, settings.activation, wgrad, store)
    act = matrix.memory.reshaped([*hidden.memory.shape[:-1], matrix.shape[-1]])
    act.stop_gradient = False
    residual, (_, low_rank) = x if settings.add_residual else None, _low_ranks(inputs, settings)
    given = Gemm.of(inputs, 1, 5), low_rank, residual, ROW
    out, fc2 = low_rank_linear_forward(rt, act, *given, quantized, of_fc1.norm.copy)
    fc1 = None if again == "mlp" else _Fc1(store or hidden, of_fc1)
    saved = _Saved(inputs, settings, fc1, None if again else act, fc2)
    return out if settings.add_residual else (out, x), saved


def _backward(rt: Recorder, saved: _Saved, dy: Placeholder, dresidual: Placeholder | None = None) -> tuple[Wanted, ...]:
    """Compute the gradients. dresidual: where x was returned; else dy is its gradient."""
    inputs, settings = saved.inputs, saved.settings
    fc1 = saved.fc1 or _Fc1(*_fc1_forward(rt, inputs, settings))
    (dact, dw2, dfc2_bias, _), _, pending = saved.fc2.backward(rt, dy)
    code, again = fc1.saved.norm.code, saved.act is None and bool(pending)
    of_fc2 = () if again else saved.fc2.factor_gradients(rt, pending)  # early, after which the activation's output goes
    assert dact is not None  # the activation's output wants one
    found = _activation_gradient(rt, rt.matrix(dact, code), fc1, inputs, settings, again)
    if found.act is not None:
        of_fc2 = saved.fc2.factor_gradients(rt, pending, found.act.memory)
    dresidual = dy if dresidual is None else dresidual
    of_norm_and_fc1 = fc1.saved.backward(rt, found.grad.memory, dresidual, found.quantized)
    dx, dln_weight, dln_bias, dw1, dfc1_bias, *of_fc1 = of_norm_and_fc1
    return dx, dln_weight, dln_bias, dw1, dfc1_bias, dw2, dfc2_bias, *of_fc1, *of_fc2


def _activation_gradient(
    rt: Recorder, dact: Matrix, fc1: _Fc1, inputs: OpInputs, settings: MLPSettings, again: bool
) -> ActivationGradient:
    """Return the ActivationGradient; again: whether the activation's output is wanted."""
    _, _, _, weight, bias, *_ = inputs.tensors
    # a bias's gradient is summed by the cast to fp8
    quantizers = inputs.quantizers[0] if bias is None or bias.stop_gradient else None
    given = fc1.out, settings.activation, fc1.saved.norm.code, quantizers, weight, again
    return activation_backward_in_both(rt, dact, *given)


ADAPTED_MLP = Op(_forward, _backward, weights=(3, 5))
