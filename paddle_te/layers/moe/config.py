"""The settings of a mixture of experts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paddle import nn

from paddle_te.layers.checks import one_of, probability, refuse
from paddle_te.layers.settings import NORMALIZATIONS, GemmSettings, LayerSettings, part
from paddle_te.ops.activations import EXPERTS_FC1_WIDTHS, FC1_WIDTHS
from paddle_te.ops.moe import Routing
from paddle_te.options.layers import DISPATCHERS

SCORE_FUNCTIONS = ("softmax", "sigmoid")
BALANCING = ("aux_loss", "seq_aux_loss", "none")
DROP_POLICIES = ("probs", "position")
RECOMPUTE_MODULES = ("moe", "moe_act")


@dataclass(frozen=True)
class GroupedLinearSettings(GemmSettings):
    """num_gemms: of experts, each of which has a weight [out_features, in_features]."""

    num_gemms: int
    in_features: int
    out_features: int


@dataclass(frozen=True)
class MoEConfig(GemmSettings):
    """The settings of a MoELayer, under the names that they have in Megatron-Core's TransformerConfig.

    hidden_size, moe_ffn_hidden_size: columns of a token, and of an expert's activation.
    num_moe_experts, moe_router_topk: experts, and how many of them a token gets.
    moe_router_score_function: "softmax" or "sigmoid", of the router's logits.
    moe_router_pre_softmax: softmax over all experts; the chosen experts keep these probabilities (Hugging Face's
        norm_topk_prob false). False: softmax over the chosen experts (norm_topk_prob true).
    moe_router_bias: a learnt bias of the logits.
    moe_router_num_groups, moe_router_group_topk, moe_router_group_best: experts are chosen among those of the best
        groups; see `ops.moe`.
    moe_router_topk_scaling_factor: multiplies the probabilities; None: 1.
    moe_router_enable_expert_bias, moe_router_bias_update_rate: experts are chosen by scores and a bias, which
        `update_expert_bias` moves by the rate after each step (DeepSeek-V3); sigmoid only.
    moe_router_load_balancing_type: "aux_loss" adds Switch Transformers' loss of all tokens, "seq_aux_loss" the
        mean over the sequences of each one's loss (DeepSeek-V2), "none" no loss.
    moe_aux_loss_coeff: factor of that loss; 0: no such loss. Hugging Face's router_aux_loss_coef is
        moe_aux_loss_coeff / moe_router_topk.
    moe_z_loss_coeff: factor of the mean of logsumexp(logits)² (Zoph et al., "ST-MoE", 2022); None: no such loss.
    moe_router_force_load_balancing: each expert gets the same number of tokens, for benchmarks.
    moe_expert_capacity_factor: an expert takes at most so many times its even share of the tokens. Further tokens are
        dropped and pass unchanged. None: nothing is dropped.
    moe_token_drop_policy: an expert keeps the tokens of the greatest "probs", or by "position" the first ones.
    moe_shared_expert_intermediate_size: of an MLP that all tokens go through besides; None: no such MLP.
    moe_shared_expert_gate: multiply its output by the sigmoid of a learnt product with the token.
    set_parallel_mode: divide the experts over ranks, see `distributed.ExpertParallel`, and the shared MLP over those of
        tensor parallelism. moe_token_dispatcher_type: how tokens come to the ranks that have their experts,
        "allgather" or "alltoall"; see `token_dispatcher`. Tensor parallel ranks always gather them.
    max_sequence_length: s; seq_aux_loss needs it under sequence parallelism, where tokens arrive flattened.
    bias: of the experts' GEMMs. activation, normalization, zero_centered_gamma, layernorm_epsilon, hidden_dropout,
        output_layer_init_method, sequence_parallel: as TransformerLayer's.
    recompute_modules: what backward computes again: "moe", all of the layer, or "moe_act", the experts' activation.
    Raises ValueError for what does not fit together.
    """

    hidden_size: int
    moe_ffn_hidden_size: int
    num_moe_experts: int
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_best: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_force_load_balancing: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    activation: str = "swiglu"
    normalization: str = "RMSNorm"
    zero_centered_gamma: bool = False
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.0
    output_layer_init_method: nn.initializer.Initializer | None = None
    set_parallel_mode: bool = False
    moe_token_dispatcher_type: str = "allgather"
    max_sequence_length: int | None = None
    recompute_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(NORMALIZATIONS, normalization=self.normalization)
        one_of(SCORE_FUNCTIONS, moe_router_score_function=self.moe_router_score_function)
        one_of(BALANCING, moe_router_load_balancing_type=self.moe_router_load_balancing_type)
        one_of(DROP_POLICIES, moe_token_drop_policy=self.moe_token_drop_policy)
        one_of(DISPATCHERS, moe_token_dispatcher_type=self.moe_token_dispatcher_type)
        one_of(EXPERTS_FC1_WIDTHS, activation=self.activation)
        probability(hidden_dropout=self.hidden_dropout)
        for name in self.recompute_modules:
            one_of(RECOMPUTE_MODULES, recompute_modules=name)
        for fault in self._faults():
            raise ValueError(fault)

    def _faults(self) -> Iterator[str]:
        """Yield what does not fit together, each in a line that says what to do."""
        experts, topk = self.num_moe_experts, self.moe_router_topk
        sigmoid = self.moe_router_score_function == "sigmoid"
        if not 1 <= topk <= experts:
            yield f"moe_router_topk={topk}: it must be from 1 to num_moe_experts, {experts}"
        if self.moe_router_enable_expert_bias and not sigmoid:
            yield "moe_router_enable_expert_bias needs moe_router_score_function='sigmoid'"
        if sigmoid and self.moe_router_pre_softmax:
            yield "moe_router_pre_softmax needs moe_router_score_function='softmax'"
        if topk == 1 and not sigmoid and not self.moe_router_pre_softmax:
            yield (
                "moe_router_topk=1 without moe_router_pre_softmax gives each chosen expert the probability 1, and the "
                "router no gradient; set moe_router_pre_softmax"
            )
        if self.by_sequence and self.sequence_parallel and self.max_sequence_length is None:
            yield "moe_router_load_balancing_type='seq_aux_loss' with sequence_parallel needs max_sequence_length"
        yield from self._faults_of_groups()
        if self.moe_expert_capacity_factor is not None and not self.moe_expert_capacity_factor > 0:
            yield f"moe_expert_capacity_factor={self.moe_expert_capacity_factor}: it must be above 0, or None"
        if self.moe_shared_expert_gate and not self.moe_shared_expert_intermediate_size:
            yield "moe_shared_expert_gate needs moe_shared_expert_intermediate_size"
        if self.moe_shared_expert_intermediate_size and self.activation not in FC1_WIDTHS:
            yield f"activation={self.activation!r} with moe_shared_expert_intermediate_size: an MLP does not have it"
        if self.moe_shared_expert_gate and self.bias:
            yield "moe_shared_expert_gate: the gate multiplies the activation, not a bias behind it; leave bias out"
        if len(self.recompute_modules) > 1:
            yield "recompute_modules: 'moe' computes the activation again, too; leave 'moe_act' out"

    def _faults_of_groups(self) -> Iterator[str]:
        groups, kept = self.moe_router_num_groups, self.moe_router_group_topk
        experts, topk, best = self.num_moe_experts, self.moe_router_topk, self.moe_router_group_best
        if groups is None and kept is None:
            if best is not None:
                yield "moe_router_group_best needs moe_router_num_groups and moe_router_group_topk"
            return
        if groups is None or kept is None:
            yield "moe_router_num_groups and moe_router_group_topk need each other"
        elif groups < 1 or experts % groups or not 1 <= kept <= groups or best is None and topk % kept:
            yield (
                f"moe_router_num_groups={groups}, moe_router_group_topk={kept}: the groups must divide the "
                f"{experts} experts, and moe_router_group_topk, at most the number of groups, moe_router_topk, {topk}, "
                "unless moe_router_group_best says how many scores count"
            )
        elif topk > kept * (experts // groups):
            yield f"moe_router_topk={topk}: {kept} groups of {experts // groups} experts are not as many"
        elif self.routing.best_of_group > experts // groups:
            yield f"{self.routing.best_of_group} best scores of a group: a group has {experts // groups} experts"

    @property
    def output_init(self) -> nn.initializer.Initializer:
        """Return the initializer of the second GEMM's weight."""
        return self.output_layer_init_method or self.weight_init

    @property
    def by_sequence(self) -> bool:
        """Return whether each sequence has a balance loss of its own."""
        return self.moe_router_load_balancing_type == "seq_aux_loss"

    def recomputes(self, part: str) -> bool:
        """Return whether backward computes "moe" or "moe_act" again."""
        return part in self.recompute_modules

    @property
    def routing(self) -> Routing:
        """Return the `ops.moe.Routing`."""
        return Routing(
            topk=self.moe_router_topk,
            score_function=self.moe_router_score_function,
            pre_softmax=self.moe_router_pre_softmax,
            num_groups=self.moe_router_num_groups,
            group_topk=self.moe_router_group_topk,
            group_best=self.moe_router_group_best,
            scaling_factor=1.0 if self.moe_router_topk_scaling_factor is None else self.moe_router_topk_scaling_factor,
        )

    def capacity(self, tokens: int) -> int | None:
        """Return the tokens that an expert takes at most, None for all."""
        if self.moe_expert_capacity_factor is None:
            return None
        return math.ceil(tokens * self.moe_router_topk / self.num_moe_experts * self.moe_expert_capacity_factor)


def of_layer(settings: LayerSettings, **options: Any) -> MoEConfig:
    """Return the MoEConfig of a TransformerLayer, with MoEConfig's `options` beside what both have.

    moe_ffn_hidden_size is ffn_hidden_size where no other is given. Raises ValueError for an MLP's settings that experts
    lack.
    """
    lacking = {name: getattr(settings, name) for name in ("mlp_chunk_tokens", "activation_func_fp8_input_store")}
    refuse(lacking, "{}: a mixture of experts has no such option; leave it out")
    settings.check_norm_kept("a mixture of experts")
    # the others are those of attention and MLPs
    again = tuple(name for name in settings.recompute_modules if name in RECOMPUTE_MODULES)
    given = dict(moe_ffn_hidden_size=settings.ffn_hidden_size, recompute_modules=again) | options
    return part(MoEConfig, settings, **given)
