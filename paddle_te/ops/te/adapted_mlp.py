"""`layernorm_mlp` with low-rank products beside its GEMMs, as an Op: see paddle_te.ops.te.recording.

As in `linear.NormedLowRankLinear` norm and activation write 16 bits, and casts make fp8 of these.
"""

from dataclasses import dataclass
from typing import NamedTuple

from paddle_te.ops.norms import norm_tensors
from paddle_te.ops.te import autograd
from paddle_te.ops.te.activation import activated_in_both, activation_backward_in_both
from paddle_te.ops.te.gemm import check_fp8, row_count
from paddle_te.ops.te.input_store import StoredInput
from paddle_te.ops.te.linear import (
    LinearSettings,
    LowRankLinearSettings,
    NormedLowRankLinear,
    SavedLowRankLinear,
    low_rank_linear_forward,
)
from paddle_te.ops.te.low_rank import LowRankSettings
from paddle_te.ops.te.norm import NormSettings
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder
from paddle_te.ops.te.runtime import Matrix, dtype_code


class _Settings(NamedTuple):
    """norm, activation, add_residual, recompute, fp8_input_store: as `mlp.MLPSettings` has them. fc1, fc2: of the
    products beside the GEMMs, None where there is none."""

    norm: NormSettings
    activation: str
    add_residual: bool
    recompute: str | None
    fp8_input_store: bool
    fc1: LowRankSettings | None
    fc2: LowRankSettings | None


class _Fc1(NamedTuple):
    """fc1's output, as the activation's backward reads it, and what fc1's own reads."""

    out: Matrix | StoredInput
    saved: NormedLowRankLinear

    @classmethod
    def forward(cls, rt, inputs, settings):
        factors, _ = _factors(inputs, settings)
        given = settings.norm, inputs.tensors[:5], factors, settings.fc1, inputs.quantizers[0], inputs
        out, saved = NormedLowRankLinear.forward(rt, *given)
        return cls(rt.matrix(out, saved.norm.code), saved)


@dataclass(slots=True)
class _Saved:
    """fc1, act: None where backward computes it again. act: the activation's output. fc2: what its backward reads."""

    inputs: OpInputs
    settings: _Settings
    fc1: _Fc1 | None
    act: Placeholder | None
    fc2: SavedLowRankLinear


def _factors(inputs, settings):
    """(fc1's, fc2's) among the tensors."""
    factors = inputs.tensors[7:]
    count = 2 * len(settings.fc1.sizes) if settings.fc1 else 0
    return factors[:count], factors[count:]


def _forward(rt, inputs, settings):
    x, *_, weight, bias = inputs.tensors[:7]
    check_fp8(inputs.quantizers[0], tokens=row_count(x), hidden_size=x.shape[-1], ffn_hidden_size=weight.shape[1])
    code, fc1, again = dtype_code("x", x), _Fc1.forward(rt, inputs, settings), settings.recompute
    stores = settings.fp8_input_store and inputs.train and again != "mlp"
    store = StoredInput(rt, fc1.out, code) if stores else None
    second, wgrad = inputs.quantizers[1], inputs.train and not weight.stop_gradient
    act, quantized = activated_in_both(rt, fc1.out, code, second, settings.activation, wgrad, store)
    act = act.memory.reshaped([*fc1.out.memory.shape[:-1], act.shape[-1]])
    act.stop_gradient = False
    residual, (_, factors) = x if settings.add_residual else None, _factors(inputs, settings)
    of_fc2 = LowRankLinearSettings(LinearSettings("row", True), settings.fc2)
    given = act, weight, bias, residual, None, factors, second, inputs.tp, inputs.train, of_fc2
    out, fc2 = low_rank_linear_forward(rt, *given, quantized)
    if store:
        fc1 = fc1._replace(out=store)
    saved = _Saved(inputs, settings, None if again == "mlp" else fc1, None if again else act, fc2)
    return out if settings.add_residual else (out, x), saved


def _backward(rt, saved, dy, dresidual=None):
    """dresidual: where x was returned; else dy is its gradient."""
    inputs, settings = saved.inputs, saved.settings
    fc1 = saved.fc1 or _Fc1.forward(rt, inputs, settings)
    (dact, dw2, dfc2_bias, _), _, pending = saved.fc2.backward(rt, dy)
    code, again = fc1.saved.norm.code, saved.act is None and bool(pending)
    of_fc2 = () if again else saved.fc2.factor_gradients(rt, pending)  # early, after which the activation's output goes
    found = _activation_gradient(rt, rt.matrix(dact, code), fc1, inputs, settings, again)
    if again:
        of_fc2 = saved.fc2.factor_gradients(rt, pending, found.act.memory)
    dresidual = dy if dresidual is None else dresidual
    of_norm_and_fc1 = fc1.saved.backward(rt, found.grad.memory, dresidual, found.quantized)
    dx, dln_weight, dln_bias, dw1, dfc1_bias, *of_fc1 = of_norm_and_fc1
    return dx, dln_weight, dln_bias, dw1, dfc1_bias, dw2, dfc2_bias, *of_fc1, *of_fc2


def _activation_gradient(rt, dact, fc1, inputs, settings, again):
    """The ActivationGradient; again: whether the activation's output is wanted."""
    _, _, _, weight, bias, *_ = inputs.tensors
    # a bias's gradient is summed by the cast to fp8
    quantizers = inputs.quantizers[0] if bias is None or bias.stop_gradient else None
    given = fc1.out, settings.activation, inputs.tensors[0].dtype, fc1.saved.norm.code, quantizers, weight, again
    return activation_backward_in_both(rt, dact, *given)


_MLP = Op(_forward, _backward, weights=(3, 5))


def adapted_mlp(x, norm, weights, low_rank, tp, quantizers, **settings):
    """`layernorm_mlp` with the products of one or two LowRankUpdates, `low_rank`, of which one may be None. weights:
    fc1's weight and bias, fc2's. settings: of _Settings, activation to fp8_input_store."""
    factors = [factor for update in low_rank if update for factor in (*update.a, *update.b)]
    fc1, fc2 = (update and LowRankSettings.of(update) for update in low_rank)
    return autograd.apply(
        _MLP,
        (x, *norm_tensors(norm), *weights, *factors),
        _Settings(NormSettings.of(norm), fc1=fc1, fc2=fc2, **settings),
        quantizers=quantizers,
        tp=tp,
    )
