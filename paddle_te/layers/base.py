"""What the layers are made of: a backend's math, parameters that ranks share, GEMMs and their fp8 state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Self

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker
from paddle.distributed.fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter

from paddle_te.distributed import ContextParallel, TensorParallel
from paddle_te.fp8 import GemmQuantizers, ModuleScaling, StoredWeight, get_autocast_state
from paddle_te.fp8.scaling import check_block_sizes
from paddle_te.layers.settings import BehindNorm, Common, GemmSettings
from paddle_te.ops import get_ops
from paddle_te.ops.interface import Ops
from paddle_te.ops.norms import Norm
from paddle_te.ops.projection import Projection


def local_size(size: int, shared_by: TensorParallel | ContextParallel | None, what: str) -> int:
    """Divide `size` over ranks, a TensorParallel or ContextParallel, None for one.

    Raises ValueError where it does not divide.
    """
    ranks = 1 if shared_by is None else shared_by.size
    if size % ranks:
        raise ValueError(f"{what}={size} is not divisible by the {ranks} ranks that share it")
    return size // ranks


def mark_split(parameter: Tensor, axis: int) -> None:
    """Tell fleet that each tensor parallel rank has a part of a parameter, which is divided along an axis."""
    parameter.is_distributed, parameter.split_axis = True, axis


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
        """Make the layer from a record, whose fields are its arguments."""
        return cls(settings)

    @property
    def ops(self) -> Ops:
        """Return the backend's module.

        It is no attribute, because attributes are copied with the layer, and modules cannot be copied.
        """
        return get_ops(self.backend)

    @property
    def dropout(self) -> float:
        """Return the probability in the layer's mode: 0 in evaluation."""
        return self.dropout_in_training if self.training else 0.0


class ParallelLayer(BackendLayer):
    """Hold what layers with parameters share: the ranks and the creation of parameters.

    fp8: the fp8 state of what has GEMMs.

    Every forward takes parameters from `_parameters` and layers from `_sub_layers`: as attributes nn.Layer finds them
    after a lookup that failed, which takes several times as long.
    """

    fp8: ModuleScaling | None = None

    def __init__(self, settings: Common, set_parallel_mode: bool = False) -> None:
        super().__init__(settings.backend)
        self.params_dtype = settings.params_dtype or paddle.get_default_dtype()
        shared = set_parallel_mode or settings.sequence_parallel
        self.tp = TensorParallel.from_fleet(settings.sequence_parallel) if shared else None

    def create_bias(self, size: int, split: bool = False) -> Tensor:
        """Make zeros [size]; split: they are this rank's part."""
        bias = self.create_constant([size], 0.0)
        if split and self.tp is not None:
            mark_split(bias, 0)
        return bias

    def create_norm(self, size: int, normalization: str, zero_centered_gamma: bool) -> tuple[Tensor, Tensor | None]:
        """Make a norm's (weight, bias) [size], at which it changes nothing.

        RMSNorm's bias is None.
        """
        weight = self.create_constant([size], 0.0 if zero_centered_gamma else 1.0)
        bias = self.create_constant([size], 0.0) if normalization == "LayerNorm" else None
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

    def create_constant(self, shape: Sequence[int], value: float) -> Tensor:
        """Make a parameter whose numbers are all the same."""
        return self.create_parameter(shape, dtype=self.params_dtype, default_initializer=nn.initializer.Constant(value))


BIASES = {"weight": "bias", "fc1_weight": "fc1_bias", "fc2_weight": "fc2_bias"}  # by the names of their GEMMs' weights


class GemmLayer(ParallelLayer):
    """Hold what layers with GEMMs share: weights, their biases and the fp8 state.

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
        state = get_autocast_state()
        recipe, keeps = state.stored_for, state.keeps_transpose
        stored = () if recipe is None else [StoredWeight(recipe, keeps) for _ in range(gemms)]
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
        bias = parameters.get(BIASES[weight])
        return Projection(parameters[weight], bias, quantizers, self.fuse_wgrad_accumulation)

    def create_weight(
        self,
        name: str,
        shape: Sequence[int],
        init_method: nn.initializer.Initializer,
        split_axis: int | None = None,
    ) -> None:
        """Make the [out, in] weight `name`.

        split_axis: the axis along which tensor parallel ranks divide it; None: each rank holds all of it.
        """
        split_axis = None if self.tp is None else split_axis
        # other random numbers on each rank that has a share
        with nullcontext() if split_axis is None else get_rng_state_tracker().rng_state():
            value = self.create_parameter(shape, dtype=self.params_dtype, default_initializer=init_method)
        weight = self._create_bytes(shape) if self.fp8.stored else value
        if split_axis is not None:
            mark_split(weight, split_axis)
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


class GemmLayerBehindNorm(GemmLayer):
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


def check_blocks(model: nn.Layer) -> None:
    """Raise ValueError where a GEMM's weight has sizes that block scaling does not take."""
    for path, layer in model.named_sublayers():
        if isinstance(layer, GemmLayer) and not layer.outside_blocks:
            for name in layer.GEMM_WEIGHTS:
                weight = layer._parameters[name]
                if weight.ndim == 2:
                    check_block_sizes(f"{path}.{name}", weight.shape)


def stored_weights(model: nn.Layer) -> dict[str, tuple[GemmLayer, str]]:
    """Return {structured name: (layer, the weight's name in it)} of the weights that the model has in fp8 only."""
    layers = [(path, layer) for path, layer in model.named_sublayers() if isinstance(layer, GemmLayer)]
    return {f"{path}.{name}": (layer, name) for path, layer in layers for name in layer.stored_weights}
