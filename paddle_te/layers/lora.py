"""LoRA (Hu et al., 2021) on Linear, LayerNormLinear and LayerNormMLP.

y = W·x becomes y = W·x + scaling·B·A·x with W frozen. A fused weight consists of parts (q, k and v; gate and up). The
layer that has the weight has an A and a B for each part: {q,k,v}_proj.{lora_A [in, r], lora_B [r, out]} and so on.

The low-rank products are added to the GEMMs' outputs, not to the weights. A sum W + scaling·B·A would keep a copy of
every weight for backward, and its gradient needs the wgrad GEMMs that a frozen weight saves. With dropout before A a
layer runs norm, fc1, activation and fc2 as single operations of the same `ops`. A merged layer is the layer without
LoRA again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker
from paddle.distributed.fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter

from paddle_te.distributed import TensorParallel
from paddle_te.fp8 import GemmQuantizers
from paddle_te.layers.base import GemmLayer, mark_split
from paddle_te.layers.linear import LayerNormLinear, Linear
from paddle_te.layers.mlp import LayerNormMLP
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.ops.projection import Projection


def attributes_of_b(config: Any) -> paddle.ParamAttr:
    """Return what B is made with: zeros, and with LoRA+ (Hayou et al., 2024, arXiv 2402.12354) a greater learning rate.

    config: a host's LoRAConfig.
    """
    rate = getattr(config, "lora_plus_scale", 1.0)
    return paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), learning_rate=rate)


class LowRank(nn.Layer):
    """Hold A and B of one part.

    Parameters: lora_A [in_features, r], lora_B [r, out_features], of this rank. parallel_mode: that of the GEMM beside
    it. "column" splits B, "row" splits A; the r columns between them are what travels, so A's (B's) gradient is whole
    on every rank, or under sequence parallelism summed by the trainer. With None no rank has a share of anything.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: Any,
        dtype: Any,
        parallel_mode: str | None = None,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.scaling = config.scaling
        self.dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout else None
        uniform = nn.initializer.KaimingUniform(negative_slope=5**0.5, nonlinearity="leaky_relu")
        make = lambda shape, init: self.create_parameter(shape, dtype=dtype, default_initializer=init)  # noqa: E731
        if tp is not None and parallel_mode == "row":
            with get_rng_state_tracker().rng_state():  # other random numbers on each rank
                self.lora_A = make([in_features, config.r], uniform)
        else:
            self.lora_A = make([in_features, config.r], uniform)
        self.lora_B = self.create_parameter([config.r, out_features], attributes_of_b(config), dtype)
        if tp is not None:
            self._mark(tp, parallel_mode)

    def _mark(self, tp: TensorParallel, parallel_mode: str | None) -> None:
        factors, split = [self.lora_A, self.lora_B], {"column": 1, "row": 0, None: None}[parallel_mode]
        if split is not None:
            mark_split(factors.pop(split), split)
        for whole in factors if tp.sequence_parallel else ():
            mark_as_sequence_parallel_parameter(whole)

    def delta(self) -> Tensor:
        """Return what merging adds to the weight: float32 [out_features, in_features]."""
        a, b = self.lora_A.astype("float32"), self.lora_B.astype("float32")
        return paddle.matmul(a, b).transpose([1, 0]) * self.scaling


class WithLoRA(GemmLayer):
    """Compute with LoRA on some of a layer's parts; `enable` makes one of the layer itself, as torch's parametrize.

    ADAPTER: the class of a part's A and B. PARALLEL_MODES: that of each of its GEMMs' weights. parts: {name of a
    weight: {name of a part: its rows on a rank}}, of all parts, in the order in which they stand in the weight.
    """

    ADAPTER: ClassVar[Any] = LowRank
    PARALLEL_MODES: ClassVar[Mapping[str, str | None]] = {}
    merged = disable_lora = False
    lora_dropout = 0.0
    parts: Mapping[str, Mapping[str, int]]

    @classmethod
    def enable(cls, layer: Any, parts: Mapping[str, Mapping[str, int]], names: Collection[str], config: Any) -> Self:
        """Turn the layer, of the class that this one extends, into one with LoRA, and return it.

        names: the parts that get A and B. config: a host's LoRAConfig, of which r, scaling and lora_dropout are read.
        Raises ValueError as `check_dropout`.
        """
        cls.check_dropout(layer, config)
        layer.parts, layer.lora_dropout = parts, config.lora_dropout or 0.0
        for weight_name, rows in parts.items():
            for part in filter(lambda part: part in names, rows):
                layer.add_sublayer(part, cls.make_adapter(layer, weight_name, rows[part], config))
        layer.__class__ = cls
        return layer

    @classmethod
    def check_dropout(cls, layer: Any, config: Any) -> None:
        """Raise ValueError for lora_dropout in a layer that is to keep less than what norm and activation give."""
        if config.lora_dropout and isinstance(layer, (LayerNormLinear, LayerNormMLP)):
            layer.settings.check_lora_dropout()

    @classmethod
    def make_adapter(cls, layer: Any, weight_name: str, rows: int, config: Any) -> nn.Layer:
        """Make A and B of a part, which has so many rows of a weight."""
        columns, parallel_mode = getattr(layer, weight_name).shape[1], cls.PARALLEL_MODES[weight_name]
        return cls.ADAPTER(columns, rows, config, layer.params_dtype, parallel_mode, layer.tp)

    @property
    def adapters(self) -> dict[str, Any]:
        """Return {name of a part: its ADAPTER}."""
        return {name: layer for name, layer in self._sub_layers.items() if isinstance(layer, self.ADAPTER)}

    @property
    def uncalled(self) -> list[nn.Layer]:
        """Return the sublayers whose weights forward hands to operations, as MultiHeadAttention's."""
        return [*self.adapters.values()]

    def plain(self) -> bool:
        """Say whether the layer computes as one without LoRA."""
        return self.merged or self.disable_lora

    @property
    def drops(self) -> bool:  # type: ignore[override]  # of a layer without LoRA a constant
        """Say whether dropout stands before A, so that norm and activation are operations of their own."""
        return self.lora_dropout > 0 and self.training and not self.plain()

    def projection(self, weight: str, quantizers: GemmQuantizers | None, x: Tensor | None = None) -> Projection:
        gemm, low_rank = super().projection(weight, quantizers), self.low_rank(weight, x)
        return gemm if low_rank is None else Projection(*gemm[:-1], low_rank)  # _replace takes three times as long

    def low_rank(self, weight: str, x: Tensor | None = None) -> LowRankUpdate | None:
        """Make the LowRankUpdate of a weight, by its name; None where no part has A and B.

        x: the input of its GEMM where `drops`. The parts share it, and with it what is dropped of it.
        """
        if self.plain():
            return None
        parts = self.parts[weight]
        layers = [self._sub_layers.get(part) for part in parts]
        found = next(filter(None, layers), None)
        if found is None:
            return None
        a, b = (tuple([layer and layer._parameters[name] for layer in layers]) for name in ("lora_A", "lora_B"))
        dropped = None if found.dropout is None or not self.training else found.dropout(x)
        return LowRankUpdate(a, b, tuple(parts.values()), found.scaling, dropped)

    def split_mapping(self) -> list[tuple[str, bool]]:
        """Return [(parameter name, is_column)] of what tensor parallelism splits, for a host's merging of ranks."""
        mode = {part: self.PARALLEL_MODES[weight] for weight, parts in self.parts.items() for part in parts}
        names = {"column": ("lora_B", True), "row": ("lora_A", False)}
        split = [(p, names[m]) for p in self.adapters if (m := mode[p]) is not None]
        return [(f"{part}.{factor}", is_column) for part, (factor, is_column) in split]

    @paddle.no_grad()
    def with_products(self, name: str, weight: Tensor, sign: int = 1) -> Tensor:
        """Return the weight of that name, a tensor, with the low-rank products added (sign -1: taken away)."""
        adapters, (*experts, _, columns) = self.adapters, weight.shape
        deltas = [
            adapters[part].delta() if part in adapters else paddle.zeros([*experts, rows, columns], "float32")
            for part, rows in self.parts[name].items()
        ]
        return (weight.astype("float32") + sign * paddle.concat(deltas, -2)).astype(weight.dtype)

    def merge(self, sign: int = 1) -> None:
        """Add the low-rank products to the weights (sign -1: take them away); forward is then the fused layer's.

        Raises RuntimeError for weights in fp8, which would round them away.
        """
        if self.merged == (sign == 1):
            return
        if self.stored_weights:
            raise RuntimeError("the weights exist in fp8 only: merge into those that they were made from")
        for name in self.parts:
            weight = getattr(self, name)
            weight.set_value(self.with_products(name, weight, sign))
        self.merged = sign == 1

    def unmerge(self) -> None:
        self.merge(sign=-1)

    def disable(self) -> None:
        """Take LoRA away, as it was before `enable` (but for what was merged)."""
        for part in self.adapters:
            del self._sub_layers[part]
        del self.parts
        for name in ("merged", "disable_lora", "lora_dropout"):
            self.__dict__.pop(name, None)
        own = [each for each in type(self).__mro__ if not issubclass(each, WithLoRA) and issubclass(each, GemmLayer)]
        self.__class__ = own[0]  # type: ignore[assignment]  # the layer that it was

    def gemm(self, x: Tensor, weight: str, quantizers: GemmQuantizers | None, residual: Tensor | None = None) -> Tensor:
        """Multiply x with a weight, by its name, with its bias and LoRA."""
        mode, projection = self.PARALLEL_MODES[weight], self.projection(weight, quantizers, x)
        return self.ops.linear(x, projection, residual=residual, parallel_mode=mode, tp=self.tp)


def normed(layer: LayerNormLinear | LayerNormMLP, x: Tensor) -> Tensor:
    """Pass x through the norm that a layer begins with, if any."""
    norm = layer.norm()
    return x if norm is None else layer.ops.normalize(x, norm)


class LoRALayerNormLinear(WithLoRA, LayerNormLinear):
    """Compute LayerNormLinear with LoRA, such as on q, k and v."""

    PARALLEL_MODES = {"weight": "column"}

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> tuple[Tensor, Tensor]:
        if not self.drops:
            return super().forward(x, is_first_microbatch)
        (quantizers,) = self.begin_forward(is_first_microbatch)
        return self.gemm(normed(self, x), "weight", quantizers), x


class LoRALinear(WithLoRA, Linear):
    """Compute a row-parallel Linear with LoRA, such as the projection behind attention."""

    PARALLEL_MODES = {"weight": "row"}


class LoRAColumnLinear(LoRALinear):
    """Compute a column-parallel Linear with LoRA, such as the one to latent attention's queries."""

    PARALLEL_MODES = {"weight": "column"}


class LoRAWholeLinear(LoRALinear):
    """Compute a Linear with LoRA that each rank has whole, such as those to latent vectors."""

    PARALLEL_MODES = {"weight": None}


class LoRALayerNormMLP(WithLoRA, LayerNormMLP):
    """Compute LayerNormMLP with LoRA on gate, if there is one, up and down."""

    PARALLEL_MODES = {"fc1_weight": "column", "fc2_weight": "row"}

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if not self.drops:
            return super().forward(x, is_first_microbatch)
        first, second = self.begin_forward(is_first_microbatch)
        act = self.ops.activate(self.gemm(normed(self, x), "fc1_weight", first), self.activation)
        at_once = self.adds_at_once
        y = self.gemm(act, "fc2_weight", second, residual=x if at_once else None)
        return y if at_once else self.added(y, x)
