"""GEMMs of experts: GroupedLinear, the experts' MLP, and the MLP that all tokens share."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_te.distributed import ExpertParallel
from paddle_te.fp8 import GemmQuantizers, get_autocast_state
from paddle_te.layers.base import BIASES, GemmLayer, local_size
from paddle_te.layers.moe.config import GroupedLinearSettings, MoEConfig
from paddle_te.layers.settings import GemmSettings, takes
from paddle_te.ops.activations import EXPERTS_FC1_WIDTHS, FC1_WIDTHS
from paddle_te.ops.moe import GroupedProjection, MoEOps, Routed, get_moe_ops


class _Grouped(GemmLayer):
    """Hold weights that are [experts, out, in]."""

    def __init__(self, settings: GemmSettings, set_parallel_mode: bool = False) -> None:
        recipe = get_autocast_state().stored_for
        if recipe is not None and recipe.kind == "block":
            raise NotImplementedError(
                "fp8_recipe=block: experts' weights that exist in fp8 only have one scale; take delayed or current "
                "scaling"
            )
        get_moe_ops(settings.backend).check_experts(getattr(settings, "activation", "swiglu"))
        super().__init__(settings, set_parallel_mode)

    @property
    def moe_ops(self) -> MoEOps:
        """Return the backend's `ops.moe.MoEOps`."""
        return get_moe_ops(self.backend)

    def grouped_projections(self, is_first_microbatch: bool | None) -> list[GroupedProjection]:
        """Begin a forward; return the GEMMs in the order of GEMM_WEIGHTS."""
        return [*map(self.grouped_projection, self.GEMM_WEIGHTS, self.begin_forward(is_first_microbatch))]

    def grouped_projection(self, weight: str, quantizers: GemmQuantizers | None) -> GroupedProjection:
        """Return the GEMM with a weight, by its name."""
        parameters = self._parameters
        bias = parameters.get(BIASES[weight])
        return GroupedProjection(parameters[weight], bias, quantizers, self.fuse_wgrad_accumulation)


class GroupedLinear(_Grouped):
    """Compute y = x · weightᵀ (+ bias) of each expert's rows, under Transformer Engine's name.

    Parameters: weight [num_gemms, out_features, in_features]; with `bias`, bias [num_gemms, out_features], zeros at
    first. Arguments: GroupedLinearSettings'.
    """

    GEMM_WEIGHTS = ("weight",)

    @takes(GroupedLinearSettings)
    def __init__(self, settings: GroupedLinearSettings) -> None:
        super().__init__(settings)
        experts, out = settings.num_gemms, settings.out_features
        self.create_weight("weight", [experts, out, settings.in_features], settings.weight_init)
        self.bias = self.create_constant([experts, out], 0.0) if settings.bias else None

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute [rows, in_features] -> [rows, out_features].

        m_splits: rows of each expert, ints or int64 [num_gemms], in fp8 multiples of 16, with block scaling of 128.
        is_first_microbatch: as TransformerLayer's.
        """
        (projection,) = self.grouped_projections(is_first_microbatch)
        return self.moe_ops.grouped_linear(x, projection, m_splits)


class GroupedMLP(_Grouped):
    """Compute the experts of a MoELayer.

    Parameters: fc1_weight [E, fc1 rows, hidden_size], of a gated activation an expert's gate rows and then its up rows,
    fc2_weight [E, hidden_size, moe_ffn_hidden_size]; with `bias` fc1_bias [E, fc1 rows] and fc2_bias
    [E, hidden_size]. With set_parallel_mode E are this rank's experts. Arguments: MoEConfig's.
    """

    GEMM_WEIGHTS = ("fc1_weight", "fc2_weight")

    @takes(MoEConfig)
    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, config.set_parallel_mode)
        self.config = config
        self.ep = ExpertParallel.from_fleet(self.tp) if config.set_parallel_mode else None
        experts, hidden, ffn = config.num_moe_experts, config.hidden_size, config.moe_ffn_hidden_size
        experts = experts if self.ep is None else self.ep.local_experts(experts)
        rows = EXPERTS_FC1_WIDTHS[config.activation] * ffn
        self._create_experts("fc1_weight", [experts, rows, hidden], config.weight_init)
        self._create_experts("fc2_weight", [experts, hidden, ffn], config.output_init)
        bias = config.bias
        self.fc1_bias = self.create_constant([experts, rows], 0.0) if bias else None
        self.fc2_bias = self.create_constant([experts, hidden], 0.0) if bias else None
        if self.ep is not None:
            for parameter in self.parameters():
                self.ep.mark(parameter)

    def _create_experts(self, name: str, shape: list[int], init_method: nn.initializer.Initializer) -> None:
        """Make the weight `name`, other numbers on each rank that has other experts."""
        self.create_weight(name, shape, init_method, split_axis=0)
        if self.ep is not None:
            self.ep.draw(self._parameters[name], init_method)

    def forward(
        self,
        x: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        residual: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        pairs: int | None = None,
    ) -> Tensor:
        """Compute [tokens, hidden_size] -> the same shape.

        probs and routing_map: a router's. residual: is added. pairs: of a token and an expert of it, at most; None:
        moe_router_topk for each token.
        """
        config = self.config
        return self.moe_ops.experts_mlp(
            x,
            Routed(probs, routing_map, config.moe_router_topk, pairs),
            *self.grouped_projections(is_first_microbatch),
            residual=residual,
            activation=config.activation,
            recompute_activation=config.recomputes("moe_act"),
        )


class SharedExpertMLP(GemmLayer):
    """Compute the MLP of all tokens beside the experts.

    Parameters: fc1_weight, fc2_weight, with biases fc1_bias and fc2_bias, as LayerNormMLP's; with
    moe_shared_expert_gate gate_weight [1, hidden_size]. Tensor parallel ranks divide the MLP, not the gate. Arguments:
    MoEConfig's.
    """

    GEMM_WEIGHTS = ("fc1_weight", "fc2_weight")

    @takes(MoEConfig)
    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, config.set_parallel_mode)
        self.config = config
        hidden, ffn = config.hidden_size, config.moe_shared_expert_intermediate_size
        if ffn is None:
            raise ValueError("SharedExpertMLP needs moe_shared_expert_intermediate_size")
        ffn = local_size(ffn, self.tp, "moe_shared_expert_intermediate_size")
        rows = FC1_WIDTHS[config.activation] * ffn
        self.create_weight("fc1_weight", [rows, hidden], config.weight_init, 0)
        self.create_weight("fc2_weight", [hidden, ffn], config.output_init, 1)
        self.fc1_bias = self.create_bias(rows, split=True) if config.bias else None
        self.fc2_bias = self.create_bias(hidden) if config.bias else None
        self.gate_weight = self._create_gate() if config.moe_shared_expert_gate else None

    def _create_gate(self) -> Tensor:
        shape, initializer = [1, self.config.hidden_size], self.config.weight_init
        gate = self.create_parameter(shape, dtype=self.params_dtype, default_initializer=initializer)
        return self.mark_if_tokens_are_split(gate)

    def forward(self, x: Tensor, residual: Tensor | None = None, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute [tokens, hidden_size] -> the same shape; residual: is added."""
        first, second = self.begin_forward(is_first_microbatch)
        moe_ops, activation = get_moe_ops(self.backend), self.config.activation
        if self.gate_weight is None:
            act = self.ops.activate(self._linear(x, "fc1", first), activation)
        else:
            x, of_gate = moe_ops.fork(x, 2)
            hidden = self._linear(x, "fc1", first)
            act = moe_ops.scaled_activate(hidden, self._gate(of_gate, self.gate_weight), activation)
        return self._linear(act, "fc2", second, residual)

    def _gate(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gate of each token, float32 [tokens]."""
        product = paddle.matmul(x.astype("float32"), weight.astype("float32"), transpose_y=True)
        gate = F.sigmoid(product)
        return (gate if self.tp is None else self.tp.enter(gate)).squeeze(1)  # of the tokens that fc1 computes

    def _linear(
        self, x: Tensor, name: str, quantizers: GemmQuantizers | None, residual: Tensor | None = None
    ) -> Tensor:
        mode, projection = {"fc1": "column", "fc2": "row"}[name], self.projection(f"{name}_weight", quantizers, x)
        return self.ops.linear(x, projection, residual=residual, parallel_mode=mode, tp=self.tp)
