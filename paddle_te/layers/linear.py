"""RMSNorm, LayerNorm, Linear, LayerNormLinear and LayerNormMLP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Self

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker
from paddle.distributed.fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter

from paddle_te.distributed import ContextParallel, TensorParallel
from paddle_te.fp8 import GemmQuantizers, ModuleScaling, StoredWeight, get_autocast_state
from paddle_te.fp8.scaling import check_block_sizes
from paddle_te.layers.dropout import add_to_residual
from paddle_te.layers.settings import (
    BehindNorm,
    Common,
    GemmSettings,
    LayerNormLinearSettings,
    LayerSettings,
    LinearSettings,
    MLPSettings,
    NormSettings,
    takes,
)
from paddle_te.ops import get_ops
from paddle_te.ops.activations import FC1_WIDTHS
from paddle_te.ops.interface import Ops
from paddle_te.ops.norms import Norm
from paddle_te.ops.projection import Projection
from paddle_te.ops.recompute import MLPRecompute


def local_size(size: int, shared_by: TensorParallel | ContextParallel | None, what: str) -> int:
    """Divide `size` over ranks, a TensorParallel or ContextParallel, None for one.

    Raises ValueError where it does not divide.
    """
    ranks = 1 if shared_by is None else shared_by.size
    if size % ranks:
        raise ValueError(f"{what}={size} is not divisible by the {ranks} ranks that share it")
    return size // ranks


class BackendLayer(nn.Layer):
    """Compute with the math of a backend, `self.ops`.

    dropout_in_training: the probability with which it drops numbers.
    """

    dropout_in_training = 0.0

    def __init__(self, backend: str) -> None:
        super().__init__()
        get_ops(backend)  # refuses what it does not know
        self.backend = backend

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Make the layer of a record, which its arguments are the fields of."""
        return cls(settings)

    @property
    def ops(self) -> Ops:
        """Return a module, hence no attribute: those are copied with the layer, which modules cannot be."""
        return get_ops(self.backend)

    @property
    def dropout(self) -> float:
        """Return the probability in the layer's mode: 0 in evaluation."""
        return self.dropout_in_training if self.training else 0.0


class _Layer(BackendLayer):
    """Hold what the layers share: the ranks and the creation of parameters. fp8: the fp8 state of what has GEMMs.

    Every forward takes parameters from `_parameters` and layers from `_sub_layers`: as attributes nn.Layer finds them
    after a lookup that failed, which takes several times as long.
    """

    fp8: ModuleScaling | None = None

    def __init__(self, settings: Common, set_parallel_mode: bool = False) -> None:
        super().__init__(settings.backend)
        self.params_dtype, sequence_parallel = (
            settings.params_dtype or paddle.get_default_dtype(),
            settings.sequence_parallel,
        )
        self.tp = TensorParallel.from_fleet(sequence_parallel) if set_parallel_mode or sequence_parallel else None

    def create_bias(self, size: int, split: bool = False) -> Tensor:
        """Make zeros [size]; split: they are this rank's part."""
        bias = self._create_vector(size, 0.0)
        if split and self.tp is not None:
            bias.is_distributed, bias.split_axis = True, 0
        return bias

    def create_norm(self, size: int, normalization: str, zero_centered_gamma: bool) -> tuple[Tensor, Tensor | None]:
        """Make a norm's (weight, bias) [size], at which it changes nothing.

        RMSNorm's bias is None.
        """
        weight = self._create_vector(size, 0.0 if zero_centered_gamma else 1.0)
        bias = self._create_vector(size, 0.0) if normalization == "LayerNorm" else None
        for vector in (weight, bias):
            if vector is not None:
                self.mark_if_tokens_are_split(vector)
        return weight, bias

    def mark_if_tokens_are_split(self, parameter: Tensor) -> Tensor:
        """Return a parameter that all tensor parallel ranks have.

        Under sequence parallelism each uses it for other tokens: the trainer sums its gradient over them.
        """
        if self.tp is not None and self.tp.sequence_parallel:
            mark_as_sequence_parallel_parameter(parameter)
        return parameter

    def _create_vector(self, size: int, value: float) -> Tensor:
        return self.create_parameter(
            [size], dtype=self.params_dtype, default_initializer=nn.initializer.Constant(value)
        )


_BIASES = {"weight": "bias", "fc1_weight": "fc1_bias", "fc2_weight": "fc2_bias"}  # by the names of their GEMMs' weights


class _WithGemms(_Layer):
    """Hold what the layers with GEMMs share: weights, their biases and the fp8 state.

    outside_blocks: under block scaling its GEMMs are in 16 bits.
    GEMM_WEIGHTS: the names of the GEMMs' weights. Made inside `fp8.fp8_model_init` these are uint8, the bytes of e4m3
    numbers, and `store_weight` gives them their values.
    """

    GEMM_WEIGHTS: ClassVar[tuple[str, ...]] = ()
    fp8: ModuleScaling
    outside_blocks = False
    drops = False  # see lora.WithLoRA

    def __init__(self, settings: GemmSettings, set_parallel_mode: bool = False) -> None:
        super().__init__(settings, set_parallel_mode)
        self.fuse_wgrad_accumulation = settings.fuse_wgrad_accumulation
        self.fp8 = self._scaling()

    def _scaling(self) -> ModuleScaling:
        gemms = len(self.GEMM_WEIGHTS)
        recipe = get_autocast_state().stored_for
        stored = () if recipe is None else [StoredWeight(recipe) for _ in range(gemms)]
        return ModuleScaling(gemms, self.ops.amax_and_scale_update, stored=stored)

    def begin_forward(self, is_first_microbatch: bool | None) -> Sequence[GemmQuantizers | None]:
        """Return the quantizers of the GEMMs, in the order of GEMM_WEIGHTS. Call it before the first kernel."""
        return self.fp8.begin_forward(self.training, is_first_microbatch) or (None,) * len(self.GEMM_WEIGHTS)

    def projections(self, is_first_microbatch: bool | None) -> list[Projection]:
        """Begin a forward; return the GEMMs in the order of GEMM_WEIGHTS."""
        return [*map(self.projection, self.GEMM_WEIGHTS, self.begin_forward(is_first_microbatch))]

    def projection(self, weight: str, quantizers: GemmQuantizers | None, x: Tensor | None = None) -> Projection:
        """Return the GEMM with a weight, by its name. x: its input, of which LoRA may drop numbers."""
        parameters = self._parameters
        bias = parameters.get(_BIASES[weight])
        return Projection(parameters[weight], bias, quantizers, self.fuse_wgrad_accumulation)

    def create_weight(
        self,
        name: str,
        shape: Sequence[int],
        init_method: nn.initializer.Initializer | None,
        split_axis: int | None = None,
    ) -> None:
        """Make the [out, in] weight `name`.

        split_axis: the axis along which tensor parallel ranks divide it; None: each rank holds all of it.
        """
        split = self.tp is not None and split_axis is not None
        # other random numbers on each rank that has a share
        with get_rng_state_tracker().rng_state() if split else nullcontext():
            value = self.create_parameter(
                shape, dtype=self.params_dtype, default_initializer=init_method or nn.initializer.Normal(0.0, 0.02)
            )
        weight = self._create_bytes(shape) if self.fp8.stored else value
        if split:
            weight.is_distributed, weight.split_axis = True, split_axis
        setattr(self, name, weight)
        if self.fp8.stored:
            self.store_weight(name, value)

    def _create_bytes(self, shape: Sequence[int]) -> Tensor:
        weight = self.create_parameter(shape, dtype="uint8", default_initializer=nn.initializer.Constant(0))
        weight.stop_gradient = True
        return weight

    @property
    def stored_weights(self) -> tuple[str, ...]:
        """Return the names of the weights that exist in fp8 only."""
        return self.GEMM_WEIGHTS if self.fp8.stored else ()

    @paddle.no_grad()
    def store_weight(self, name: str, value: Tensor) -> None:
        """Quantize a tensor into the weight `name`, one of `stored_weights`.

        value: this rank's share of the weight. Tensor parallel ranks that share the weight have one scale, so that each
        quantizes its share as one process would quantize the whole weight. With block scaling each has the scales of
        its share's blocks. Raises ValueError where 128 does not divide the sizes of such a share.
        """
        weight, stored = self._parameters[name], self.fp8.stored[self.GEMM_WEIGHTS.index(name)]
        if stored.scaling.in_blocks:
            check_block_sizes(name, weight.shape)
        group = self.tp.group if self.tp is not None and weight.is_distributed else None
        self.ops.quantize_weight(value.astype(self.params_dtype), weight, stored, group)


def check_blocks(model: nn.Layer) -> None:
    """Raise ValueError where a GEMM's weight has sizes that block scaling does not take."""
    for path, layer in model.named_sublayers():
        if isinstance(layer, _WithGemms) and not layer.outside_blocks:
            for name in layer.GEMM_WEIGHTS:
                weight = layer._parameters[name]
                if weight.ndim == 2:
                    check_block_sizes(f"{path}.{name}", weight.shape)


def stored_weights(model: nn.Layer) -> dict[str, tuple[_WithGemms, str]]:
    """Return {structured name: (layer, the weight's name in it)} of the weights that the model has in fp8 only."""
    layers = [(path, layer) for path, layer in model.named_sublayers() if isinstance(layer, _WithGemms)]
    return {f"{path}.{name}": (layer, name) for path, layer in layers for name in layer.stored_weights}


class _Norm(_Layer):
    """Compute a norm."""

    normalization: ClassVar[str]

    @takes(NormSettings)
    def __init__(self, settings: NormSettings) -> None:
        super().__init__(settings)
        self.eps, self.zero_centered_gamma = settings.eps, settings.zero_centered_gamma
        self.weight, self.bias = self.create_norm(settings.hidden_size, self.normalization, self.zero_centered_gamma)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute [..., hidden_size] -> the same shape and dtype; residual, if any, is added."""
        return self.ops.normalize(x, Norm(self.weight, self.eps, self.bias, self.zero_centered_gamma), residual)


def norm_of(settings: NormSettings | None, normalization: str | None) -> RMSNorm | LayerNorm | None:
    """Make the layer, RMSNorm or LayerNorm; None without settings."""
    if settings is None or normalization is None:
        return None
    return RMSNorm.of(settings) if normalization == "RMSNorm" else LayerNorm.of(settings)


class RMSNorm(_Norm):
    """Compute y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019).

    Parameters: weight [hidden_size]. Arguments: NormSettings'.
    """

    normalization = "RMSNorm"


class LayerNorm(_Norm):
    """Compute y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias (Ba et al., 2016).

    Parameters: weight and bias [hidden_size]. Arguments: as RMSNorm's.
    """

    normalization = "LayerNorm"


class Linear(_WithGemms):
    """Compute y = x · weightᵀ (+ bias) (+ residual).

    Parameters: weight [out_features, in_features], split over the tensor parallel ranks on axis 0 (`parallel_mode`
    "column") or 1 ("row"); with `bias`, bias [out_features], zeros at first, split where it is column parallel.
    sequence_parallel: a column-parallel one's input, and a row-parallel one's output, are this rank's tokens.
    Arguments: LinearSettings'. Raises ValueError for another parallel_mode, and for sizes that the ranks do not divide.
    """

    GEMM_WEIGHTS = ("weight",)

    @takes(LinearSettings)
    def __init__(self, settings: LinearSettings) -> None:
        super().__init__(settings, settings.parallel_mode is not None)
        self.parallel_mode = settings.parallel_mode if self.tp is not None else None
        split_axis = {"column": 0, "row": 1, None: None}[self.parallel_mode]
        shape = [settings.out_features, settings.in_features]
        if split_axis is not None:
            shape[split_axis] = local_size(shape[split_axis], self.tp, ("out_features", "in_features")[split_axis])
        self.create_weight("weight", shape, settings.init_method, split_axis)
        self.bias = self.create_bias(shape[0], split_axis == 0) if settings.bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute [..., in_features of this rank] -> [..., out_features of this rank].

        residual, if any, is of that shape and added. is_first_microbatch: as TransformerLayer's.
        """
        (quantizers,) = self.begin_forward(is_first_microbatch)
        projection = self.projection("weight", quantizers, x)
        return self.ops.linear(x, projection, residual=residual, parallel_mode=self.parallel_mode, tp=self.tp)


class _BehindNorm(_WithGemms):
    """Begin with a norm, whose parameters are ln_weight and ln_bias."""

    def __init__(self, settings: BehindNorm, size: int, eps: float) -> None:
        super().__init__(settings, settings.set_parallel_mode)
        self.settings, self._norm_again = settings, settings.norm_again
        self.eps, self.zero_centered_gamma = eps, settings.zero_centered_gamma
        kind, centered = settings.normalization, self.zero_centered_gamma
        none: tuple[Tensor | None, Tensor | None] = (None, None)
        self.ln_weight, self.ln_bias = none if kind is None else self.create_norm(size, kind, centered)

    def norm(self) -> Norm | None:
        """Return the `ops.norms.Norm`, or None."""
        parameters = self._parameters
        weight = parameters.get("ln_weight")
        if weight is None:
            return None
        return Norm(weight, self.eps, parameters.get("ln_bias"), self.zero_centered_gamma, self._norm_again)


class LayerNormLinear(_BehindNorm):
    """Compute y = norm(x) · weightᵀ (+ bias), column parallel.

    Parameters: ln_weight [in_features], LayerNorm's ln_bias [in_features], weight [out_features / tp, in_features];
    with `bias`, bias [out_features / tp], zeros at first.
    Arguments: LayerNormLinearSettings'.
    """

    GEMM_WEIGHTS = ("weight",)

    @takes(LayerNormLinearSettings)
    def __init__(self, settings: LayerNormLinearSettings) -> None:
        super().__init__(settings, settings.in_features, settings.eps)
        rows = local_size(settings.out_features, self.tp, "out_features")
        self.create_weight("weight", [rows, settings.in_features], settings.init_method, 0)
        self.bias = self.create_bias(rows, split=True) if settings.bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> tuple[Tensor, Tensor]:
        """Compute [..., in] -> ([..., out of this rank], x).

        The second value is x again: use it for the residual branch, so that backward adds both gradients of x
        inside RMSNorm's kernel.
        """
        (projection,) = self.projections(is_first_microbatch)
        return self.ops.layernorm_linear(x, self.norm(), projection, tp=self.tp)


class LayerNormMLP(_BehindNorm):
    """Compute y = x + dropout(act(norm(x) · fc1ᵀ (+ fc1_bias)) · fc2ᵀ (+ fc2_bias)), the residual included.

    Parameters: ln_weight [hidden_size], LayerNorm's ln_bias [hidden_size], fc1_weight [ffn_hidden_size / tp,
    hidden_size], where the activation is gated [2 · ffn_hidden_size / tp, hidden_size] (this rank's gate rows, then its
    up rows), fc2_weight [hidden_size, ffn_hidden_size / tp]; with `bias`, fc1_bias like fc1_weight's rows and fc2_bias
    [hidden_size]; with norms "after" or "both" post_norm.weight, with norms "after" no ln_weight.
    Arguments: MLPSettings'.
    """

    GEMM_WEIGHTS = ("fc1_weight", "fc2_weight")

    slot = "layernorm_mlp"

    @takes(MLPSettings)
    def __init__(self, settings: MLPSettings) -> None:
        hidden_size = settings.hidden_size
        super().__init__(replace(settings, normalization=settings.norm_before), hidden_size, settings.eps)
        self.post_norm = norm_of(settings.norm_after(hidden_size, settings.eps), settings.normalization)
        self.dropout_in_training, self.activation = settings.hidden_dropout, settings.activation
        ffn = local_size(settings.ffn_hidden_size, self.tp, "ffn_hidden_size")
        fc1_rows = FC1_WIDTHS[self.activation] * ffn
        self.recompute = MLPRecompute(settings.mlp_again, settings.chunk_tokens, settings.input_store(ffn))
        self.create_weight("fc1_weight", [fc1_rows, hidden_size], settings.init_method, 0)
        self.create_weight("fc2_weight", [hidden_size, ffn], settings.output_init, 1)
        self.fc1_bias = self.create_bias(fc1_rows, split=True) if settings.bias else None
        self.fc2_bias = self.create_bias(hidden_size) if settings.bias else None

    @classmethod
    def of_layer(cls, settings: LayerSettings) -> LayerNormMLP:
        """Make the feed-forward of a TransformerLayer."""
        return cls.of(settings.mlp)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute [..., hidden_size] -> the same shape and dtype.

        is_first_microbatch: as TransformerLayer's.
        """
        fc1, fc2 = self.projections(is_first_microbatch)
        out = self.ops.layernorm_mlp(
            x,
            self.norm(),
            fc1,
            fc2,
            activation=self.activation,
            add_residual=self.adds_at_once,
            recompute=self.recompute,
            tp=self.tp,
        )
        return self.added(*out) if isinstance(out, tuple) else out

    @property
    def adds_at_once(self) -> bool:
        """Say whether the residual is added in the GEMM."""
        return not self.dropout and self.post_norm is None

    def added(self, out: Tensor, x: Tensor) -> Tensor:
        """Return x and what the MLP adds to it."""
        return add_to_residual(out, x, self.post_norm, self.dropout, self.tp)
