"""LoRA on a MoELayer: each expert has an A and a B of its own for gate, up and down, and so has the shared MLP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

from paddle_te.distributed import ExpertParallel
from paddle_te.fp8 import GemmQuantizers
from paddle_te.layers.lora import WithLoRA, attributes_of_b
from paddle_te.layers.moe.experts import GroupedMLP, SharedExpertMLP
from paddle_te.ops.moe import GroupedLowRank, GroupedProjection


class GroupedLowRanks(nn.Layer):
    """Hold A and B of one part of all experts, or of this rank's.

    Parameters: lora_A [experts, r, in_features], lora_B [experts, out_features, r]. ep: the ranks that divide the
    experts, or None.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        config: Any,
        dtype: Any,
        ep: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        self.scaling = config.scaling
        uniform = nn.initializer.Uniform(-(in_features**-0.5), in_features**-0.5)  # Kaiming's of a single A
        make = lambda shape, init: self.create_parameter(shape, dtype=dtype, default_initializer=init)  # noqa: E731
        by_tensor_parallelism = ep is not None and ep.replicas is None
        with get_rng_state_tracker().rng_state() if by_tensor_parallelism else nullcontext():
            self.lora_A = make([experts, config.r, in_features], uniform)
        self.lora_B = self.create_parameter([experts, out_features, config.r], attributes_of_b(config), dtype)
        if ep is not None:
            ep.draw(self.lora_A, uniform)
            for parameter in self.parameters():
                ep.mark(parameter)

    def delta(self) -> Tensor:
        """Return what merging adds to the weights: float32 [experts, out_features, in_features]."""
        return paddle.bmm(self.lora_B.astype("float32"), self.lora_A.astype("float32")) * self.scaling


class LoRAGroupedMLP(WithLoRA, GroupedMLP):
    """Compute GroupedMLP with LoRA on gate, if there is one, up and down."""

    ADAPTER = GroupedLowRanks

    @classmethod
    def check_dropout(cls, layer: Any, config: Any) -> None:
        """Raise ValueError for lora_dropout."""
        if config.lora_dropout:
            raise ValueError(
                f"lora_dropout={config.lora_dropout}: experts have no dropout before A; set it to 0, or leave the "
                "experts out of target_modules"
            )

    @classmethod
    def make_adapter(cls, layer: Any, weight_name: str, rows: int, config: Any) -> nn.Layer:
        """Make A and B of a part of each expert, which has so many rows of its weight."""
        experts, _, columns = getattr(layer, weight_name).shape
        return cls.ADAPTER(experts, columns, rows, config, layer.params_dtype, layer.ep)

    def grouped_projection(self, weight: str, quantizers: GemmQuantizers | None) -> GroupedProjection:
        """Return the GEMM with a weight, with LoRA unless it is merged or disabled."""
        gemm = super().grouped_projection(weight, quantizers)
        return gemm if self.plain() else gemm._replace(low_rank=self._grouped_low_rank(weight))

    def _grouped_low_rank(self, weight: str) -> GroupedLowRank | None:
        """Return what LoRA adds beside a weight: the parts' A stacked, and their B times scaling in blocks."""
        layers = [self._sub_layers.get(part) for part in self.parts[weight]]
        there = [layer for layer in layers if layer is not None]
        if not there:
            return None
        (experts, r, _), dtype = there[0].lora_A.shape, there[0].lora_A.dtype
        in_float32 = lambda tensor: tensor.astype("float32")  # noqa: E731, on a CPU Paddle joins no others
        blocks = []
        for rows, layer in zip(self.parts[weight].values(), layers, strict=True):
            zeros = paddle.zeros([experts, rows, r])
            own = zeros if layer is None else in_float32(layer.lora_B) * layer.scaling
            blocks.append(paddle.concat([own if other is layer else zeros for other in there], 2))
        a = paddle.concat([in_float32(layer.lora_A) for layer in there], 1)
        return GroupedLowRank(a.astype(dtype), paddle.concat(blocks, 1).astype(dtype))

    def split_mapping(self) -> list[tuple[str, bool]]:
        """Return [(parameter name, False)] of all A and B: each rank has those of its experts, behind each other."""
        return [(f"{part}.{factor}", False) for part in self.adapters for factor in ("lora_A", "lora_B")]


class LoRASharedExpertMLP(WithLoRA, SharedExpertMLP):
    """Compute SharedExpertMLP with LoRA on gate, if there is one, up and down."""

    PARALLEL_MODES = {"fc1_weight": "column", "fc2_weight": "row"}
