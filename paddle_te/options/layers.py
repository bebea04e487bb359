"""The flags that decide on the decoder layers, in all training, and what a model's configuration says of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias

from paddle_te.options.fp8 import SKIP_LAYERS, skipped_layers
from paddle_te.options.option import (
    FLAG,
    GIVEN,
    NOT_NEGATIVE,
    POSITIVE,
    SEARCHED,
    SEQUENCES,
    choice,
    option,
    options_of,
    section,
    some_of,
    whole,
)
from paddle_te.records import Record, record

# --transformer_engine_backend by the short names that the launcher, reports and tests have
BACKENDS = {"none": "none", "pd": "paddle", "te": "transformer_engine"}
DISPATCHERS = ("allgather", "alltoall")  # --moe_token_dispatcher_type
# fp8 recipes, and what must divide the dimensions of their GEMMs: cuBLASLt wants leading dimensions in multiples of 16,
# and each dimension leads in fprop, dgrad or wgrad; a block has 128 numbers.
FP8_RECIPES = {"delayed": 16, "current": 16, "block": 128}
DELAYED = {"fp8_recipe": "delayed"}
# The parts of a decoder layer that backward can compute again; `layers.TransformerLayer` says what each one is
RECOMPUTE_MODULES = ("layernorm", "mlp_act", "mlp", "moe_act", "moe", "core_attn")
# Flags by which planner and hosts call what they stand for
AGAIN, LAYERS_ON_HOST = "recompute_modules", "offload_activations"
HISTORY = replace(SEQUENCES, unit="steps")
# Where te's GEMMs add up a weight's gradient: True: in its main_grad, float32; "grad": in its grad, what backward finds
# there; False: nowhere, Paddle adds it to its grad.
FuseWgrad: TypeAlias = bool | Literal["grad"]


@section
class Layers:
    """What decides on the decoder layers, and goes into a model's configuration."""

    transformer_engine_backend: str = option(
        choice(*BACKENDS.values()),
        default="none",
        help="What a decoder layer is made of: none (PaddleNLP's own), paddle (Paddle operations) or "
        "transformer_engine.",
        doc="`none`, `paddle`, `transformer_engine`",
        zh="`none`、`paddle`、`transformer_engine`",
        config=True,
    )
    use_fp8: bool = option(
        FLAG,
        default=False,
        help="Run the decoder layers' GEMMs in fp8 (backend paddle emulates its rounding).",
        doc="GEMMs of the decoder layers in fp8; with `paddle` emulated",
        zh="decoder 层的 GEMM 使用 fp8；后端为 `paddle` 时是模拟",
        config=True,
    )
    fp8_recipe: str = option(
        choice(*FP8_RECIPES, others="mxfp8 and nvfp4 need compute capability 10.0, Blackwell's"),
        default="delayed",
        doc="`delayed`, `current` or `block` scaling; [which one](../background/fp8.md#scaling)",
        zh="`delayed`、`current` 或 `block` scaling；[如何选择](../background/fp8.md#scaling)",
        config=True,
        planned=GIVEN,
    )
    fp8_amax_history_len: int = option(
        HISTORY,
        default=1024,
        help="Steps of amax history (delayed scaling).",
        doc="steps, delayed scaling",
        zh="步数，delayed scaling",
        config=True,
        needs=DELAYED,
    )
    fp8_reduce_amax: bool = option(
        FLAG,
        default=True,
        doc="delayed scaling: ranks share the greatest amax, and so their scales; `false`: each has its own, without a "
        "collective in each step, not with sequence parallelism, and a run of several processes cannot be resumed",
        zh="delayed scaling：各 rank 共用最大的 amax，因而 scale 相同；`false`：各 rank 使用自己的 scale，"
        "每步不需要集合通信；不能与序列并行同用，多进程的运行不能恢复",
        config=True,
        needs=DELAYED,
    )
    fp8_dpa: bool = option(
        FLAG,
        default=False,
        doc="with `--use_fp8`: attention in fp8 as well, as TE's recipe option; for trials: [the loss of long runs "
        "went up for good](../background/fp8.md#attention-in-fp8). Delayed scaling, te: Hopper and newer, heads of "
        "128, sequences of a multiple of 16; no packed documents, no key-value cache",
        zh="配合 `--use_fp8`：attention 也用 fp8（TE 的 recipe 选项），仅供试验："
        "[长时间训练中 loss 会发散](../background/fp8.md#attention-in-fp8)。"
        "仅 delayed scaling；te 需 Hopper 或更新的 GPU，"
        "head 大小 128，序列长度为 16 的倍数；不支持打包的文档和 key-value cache",
        config=True,
        needs={"use_fp8": True, **DELAYED},
        planned=SEARCHED,
    )
    fp8_dpa_bwd: bool = option(
        FLAG,
        default=True,
        help="With fp8_dpa: attention's backward too; false: in the activations' precision.",
        doc="false: attention's backward in the activations' precision (TE's `NVTE_FP8_DPA_BWD=0`); the loss went up "
        "sooner",
        zh="false：attention 的反向用激活的精度（TE 的 `NVTE_FP8_DPA_BWD=0`）；loss 发散得更早",
        config=True,
        needs={"fp8_dpa": True},
    )
    fp8_lm_head: bool = option(
        FLAG,
        default=False,
        help="The language model's head in fp8 as well (16, with block scaling 128, divides each rank's vocabulary).",
        doc="with `--use_fp8`: lm_head's GEMMs in fp8 as well; [when it "
        "pays](../background/fp8.md#the-head-in-fp8). Each rank's vocabulary a multiple of 16, with block scaling "
        "of 128; not with `--use_fused_linear_cross_entropy`",
        zh="配合 `--use_fp8`：lm_head 的 GEMM 也用 fp8，[何时划算](../background/fp8.md#the-head-in-fp8)。"
        "每个 rank 的词表大小须为 16 的倍数（block scaling 时为 128）；不能与 `--use_fused_linear_cross_entropy` 同用",
        config=True,
        needs={"use_fp8": True},
        planned=SEARCHED,
    )
    fp8_skip_layers: str = option(
        SKIP_LAYERS,
        default="",
        doc="decoder layers at either end of the model that compute in 16 bits, as `first:1,last:1`, which is "
        "Megatron's `first_last_layers_bf16`; [when](../background/fp8.md#is-it-healthy)",
        zh="模型首尾以 16 位计算的 decoder 层，如 `first:1,last:1`，即 Megatron 的 `first_last_layers_bf16`；"
        "[何时使用](../background/fp8.md#is-it-healthy)",
        shown="none",
        shown_zh="无",
        config=True,
        needs={"use_fp8": True},
        planned=GIVEN,
    )

    recompute_modules: tuple[str, ...] | None = option(
        some_of(*RECOMPUTE_MODULES),
        default=None,
        doc="parts of each decoder layer that backward computes again instead of keeping what they give, one or more "
        "of `layernorm`, `mlp_act` (the MLP's activation), `mlp` (all of it but the last GEMM), `moe_act` and `moe` "
        "([the experts' activation, and the whole of their half](../guides/moe.md#memory)) and `core_attn`; "
        "[what each one saves](../background/recompute.md). Not with `--recompute_granularity full`",
        zh="每个 decoder 层中不保留结果、在反向时重新计算的部分：`layernorm`、`mlp_act`（MLP 的激活函数）、"
        "`mlp`（除最后一个 GEMM 之外的整个 MLP）、`moe_act` 和 `moe`"
        "（[专家的激活函数，以及专家所在的整个后半层](../guides/moe.md#memory)）、`core_attn`，可写多个；"
        "[各节省多少](../background/recompute.md)。"
        "不能与 `--recompute_granularity full` 同用",
        config=True,
        planned=SEARCHED,
    )
    activation_func_fp8_input_store: bool = option(
        FLAG,
        default=False,
        doc="keep the input of the MLP's activation for backward in fp8 (MXFP8), in half of the memory. Megatron's "
        "flag; [what it saves, and how exact it is](../background/recompute.md#the-activations-input-in-fp8)",
        zh="MLP 激活函数的输入以 fp8（MXFP8）保存到反向，显存减半。与 Megatron 的同名参数相同；"
        "[节省多少、精度如何](../background/recompute.md#the-activations-input-in-fp8)",
        config=True,
        planned=GIVEN,
    )
    mlp_chunk_tokens: int = option(
        whole(0, limit=2**24),
        default=0,
        help="The MLP takes at most N tokens at a time, forward and backward, and computes each such chunk again in "
        "backward, for long sequences; 0: all at once.",
        doc="the MLP takes at most N tokens at a time, forward and backward, and computes each such chunk again in "
        "backward, so that what it needs in between takes the memory of one chunk; "
        "[for long sequences](../background/long-sequences.md#the-mlp-in-chunks)",
        zh="MLP 的前向和反向每次至多处理 N 个 token，反向时逐块重新计算，因此中间结果只占一块的显存；"
        "[用于长序列](../background/long-sequences.md#the-mlp-in-chunks)",
        config=True,
        planned=SEARCHED,
    )
    moe_aux_loss_coeff: float | None = option(
        NOT_NEGATIVE,
        default=None,
        doc="factor of [the loss that balances the load of experts](../guides/moe.md#training), in each layer that "
        "has some; by default config.json's `router_aux_loss_coef`. Megatron's flag",
        zh="[平衡专家负载的辅助 loss](../guides/moe.md#training) 的系数，用于每个含专家的层；"
        "默认取 config.json 的 `router_aux_loss_coef`。与 Megatron 的同名参数相同",
        config=True,
    )
    moe_expert_capacity_factor: float | None = option(
        POSITIVE,
        default=None,
        doc="an expert takes at most so many times its even share of a rank's tokens of a micro-batch, those with the "
        "greatest probabilities; the others pass it by. By default experts take all tokens. Megatron's flag",
        zh="一个专家最多处理其在该 rank 的 micro-batch 中平均份额若干倍的 token（概率最大的那些），其余 token 绕过"
        "该专家；默认处理全部 token。与 Megatron 的同名参数相同",
        config=True,
    )
    moe_router_bias_update_rate: float | None = option(
        NOT_NEGATIVE,
        default=None,
        help="After each step the bias by which DeepSeek-V3 chooses experts goes up by it for experts that had fewer "
        "tokens than the mean, and down for those that had more; 0: it stays. Default: 0.001.",
        doc="after each step [the bias by which DeepSeek-V3 chooses experts](../guides/moe.md#deepseek) goes up by it "
        "for experts that had fewer tokens than the mean, and down for those that had more; 0: it stays. By default "
        "0.001. Megatron's flag",
        zh="每步之后，[DeepSeek-V3 选择专家时所用的偏置](../guides/moe.md#deepseek) 的变化量：token 数低于平均的专家"
        "加上它，高于平均的减去它；0：偏置不变。默认为 0.001。与 Megatron 的同名参数相同",
        config=True,
    )
    moe_router_force_load_balancing: bool = option(
        FLAG,
        default=False,
        doc="each expert gets as many tokens, whatever the router says: for benchmarks, as Megatron's flag. Such a "
        "model learns nothing of use",
        zh="无论 router 的结果如何，每个专家都得到同样多的 token：仅用于性能测试，与 Megatron 的同名参数相同；"
        "这样训练出的模型没有用处",
        config=True,
    )
    moe_token_dispatcher_type: str = option(
        choice(*DISPATCHERS),
        default="allgather",
        help="With expert_parallel_degree: every rank gathers all tokens of the ranks that divide the experts, or "
        "alltoall sends each token to the ranks of its experts, for which the host waits once a layer.",
        doc="with `--expert_parallel_degree`: each rank gathers all tokens (`allgather`), or tokens go to the ranks of "
        "their experts only (`alltoall`); [which one](../background/parallelism.md#experts)",
        zh="配合 `--expert_parallel_degree`：每个 rank 收集全部 token（`allgather`），或 token 只发往其专家所在的 rank"
        "（`alltoall`）；[如何选择](../background/parallelism.md#experts)",
        config=True,
        planned=SEARCHED,
    )
    moe_z_loss_coeff: float | None = option(
        NOT_NEGATIVE,
        default=None,
        help="Factor of the z-loss, which keeps the router's logits small, in each layer that has experts; default: no "
        "such loss.",
        doc="factor of [the z-loss](../guides/moe.md#training), which keeps the router's logits small, in each layer "
        "that has experts; by default there is none. Megatron's flag",
        zh="[z-loss](../guides/moe.md#training) 的系数，用于每个含专家的层，使 router 的 logits 保持较小；默认没有。"
        "与 Megatron 的同名参数相同",
        config=True,
    )
    offload_activations: int = option(
        whole(0, limit=10_000),
        default=0,
        doc="te: what the first N decoder layers keep for backward lies in pinned host memory meanwhile, copied beside "
        "computing; at most all layers but two. [What to know](../background/offload.md)",
        zh="te：前 N 个 decoder 层为反向保存的内容在此期间放在锁页的主机内存中，拷贝与计算同时进行；"
        "至多为总层数减二。[说明](../background/offload.md)",
        config=True,
        planned=SEARCHED,
    )

    def skipped_layers(self, layers: int) -> frozenset[int]:
        """Return the numbers of the layers, of so many, that compute in 16 bits while the others do in fp8."""
        return skipped_layers(self.fp8_skip_layers, layers) if self.use_fp8 else frozenset()


LAYERS = options_of(Layers)
LAYER_OPTIONS = {option.name: option for option in LAYERS}


@record
class LayerOptions(Record, Layers):
    """What a model's configuration says of its decoder layers: LayerOptions.of(config).fp8_recipe.

    fuse_wgrad_accumulation follows from other flags, see `Job.fuses_wgrad`.
    """

    fuse_wgrad_accumulation: FuseWgrad = False

    @classmethod
    def of(cls, config: object) -> LayerOptions:
        """Read a configuration; what it does not say, such as Hugging Face's, means the default."""
        return cls(**cls.said_by(config))

    @classmethod
    def said_by(cls, config: object) -> dict[str, Any]:
        """Return {field: value} of those that a configuration has."""
        return {each.name: getattr(config, each.name) for each in fields(cls) if hasattr(config, each.name)}


def again(*modules: str) -> dict[str, object]:
    """Return the flags with which backward computes these parts of each layer again."""
    return {AGAIN: modules}


def in_chunks(tokens: int) -> dict[str, object]:
    """Return the flag with which the MLP takes so many tokens at a time."""
    return {"mlp_chunk_tokens": tokens}


def stored_in_fp8(on: bool) -> dict[str, object]:
    """Return the flag with which the input of the MLP's activation is kept in fp8."""
    return {"activation_func_fp8_input_store": on}
