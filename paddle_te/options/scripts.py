"""The flags of run_pretrain.py, run_finetune.py and run_eval.py: ours, and PaddleNLP's that we check or read.

A section has what belongs together, ours and PaddleNLP's (`theirs`). `paddle_te.job` makes the record of a run of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, replace

from paddle_te.options.fp8 import FALLBACK, SKIP_LAYERS, skipped_layers
from paddle_te.options.lora import LoRA
from paddle_te.options.option import (
    BELOW_ONE,
    FLAG,
    FRACTION,
    GIVEN,
    HOSTED,
    MICRO_BATCHES,
    NOT_NEGATIVE,
    PATH,
    PATH_OR_EMPTY,
    POSITIVE,
    RANKS,
    REQUIRED,
    SAME,
    SAMPLES,
    SEARCHED,
    SEED,
    SEQUENCES,
    SILENT,
    STEPS,
    STEPS_OR_NONE,
    TEXT,
    TEXTS,
    TOKENS,
    Kind,
    Option,
    choice,
    number,
    option,
    options_of,
    section,
    some_of,
    theirs,
    whole,
)
from paddle_te.records import Record, record

# --transformer_engine_backend by the short names that the launcher, reports and tests have
BACKENDS = {"none": "none", "pd": "paddle", "te": "transformer_engine"}
DISPATCHERS = ("allgather", "alltoall")  # --moe_token_dispatcher_type
DTYPES = ("float32", "bfloat16", "float16")
# How much of a manifest is compared before a checkpoint is loaded; `manifest.damage` says what each means
LEVELS = ("full", "size", "none")
# How AdamW's state may be kept, and how many bytes of it belong to a number; int8 has a float32 unit for 256 numbers
MOMENTS: dict[str, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}
MASTER_WEIGHTS: dict[str, float] = {"float32": 4, "bf16_remainder": 2}
UPDATED_HERE = ("adamw", "muon")  # those of --optim that are ours, on Paddle's AdamW
STATES: dict[str, dict[str, float]] = {"optim_moments": MOMENTS, "master_weights": MASTER_WEIGHTS}
# Elements of weights whose states the device holds at a time where they are offloaded; the GPU waits less with more
OFFLOADED_AT_ONCE = 12 * 2**23
# Tokens whose logits exist at a time with --use_fused_linear_cross_entropy. Each chunk reads and writes the float32
# gradient of the whole weight once. Smaller chunks are slower and save little memory, because that gradient dominates:
# with 2048 tokens of Llama-3-8B the logits take 0.5 GB (in pd their float32 copy another 1.1), the weight's gradient
# 2.1 GB. Liger's rule, logits as large as the hidden states, would give 256.
LOSS_CHUNK_TOKENS = 2048
# How an update in backward may clip gradients
IN_BACKWARD = ("off", "unclipped", "last_norm")
# The flags of the optimizer that memory depends on, with their values, of which the first is the default
OPTIMIZER: dict[str, Iterable[str]] = {**STATES, "optimizer_in_backward": IN_BACKWARD}
OPTIMIZER_DEFAULTS = {name: next(iter(kinds)) for name, kinds in OPTIMIZER.items()}
# fp8 recipes, and what must divide the dimensions of their GEMMs: cuBLASLt wants leading dimensions in multiples of 16,
# and each dimension leads in fprop, dgrad or wgrad; a block has 128 numbers.
FP8_RECIPES = {"delayed": 16, "current": 16, "block": 128}
DELAYED = {"fp8_recipe": "delayed"}
# The parts of a decoder layer that backward can compute again; `layers.TransformerLayer` says what each one is
RECOMPUTE_MODULES = ("layernorm", "mlp_act", "mlp", "moe_act", "moe", "core_attn")


def chosen(kept: object, flags: Iterable[str]) -> list[str]:
    """Return those of STATES or OPTIMIZER that are not at their default, as on a command line.

    kept: has an attribute for each.
    """
    return [f"--{name} {kind}" for name in flags if (kind := getattr(kept, name)) != OPTIMIZER_DEFAULTS[name]]


def proportions(split: str) -> list[float]:
    """Return three numbers from "949,50,1" or "949/50/1". Raise ValueError where one is none."""
    return [float(part) for part in split.replace("/", ",").split(",")]


def _is_split(split: str) -> bool:
    try:
        parts = proportions(split)
    except ValueError:
        return False
    return len(parts) == 3 and min(parts) >= 0 and 0 < sum(parts) < float("inf")


def _are_patterns(texts: Iterable[str]) -> bool:
    try:
        return all(text != "" and re.compile(text) for text in texts)
    except (re.error, RecursionError, OverflowError):
        return False


PATTERNS = Kind(TEXTS.type, "regular expressions of Python's re", _are_patterns)
SPLIT = Kind(str, "three numbers, train,valid,test, such as 949,50,1", _is_split)

# PaddleNLP's -1 for "not given" stays allowed where it means that.
_NOT_GIVEN = Kind(int, "-1 (not given) or a whole number of at least 1", lambda n: n == -1 or n >= 1, whole(0).read)
_DEGREE, _MOST_STEPS = replace(_NOT_GIVEN, limits=RANKS.limits), replace(_NOT_GIVEN, limits=STEPS.limits)
_STAGES = choice("", "stage1", "stage2", "stage3")
_SHARDING = Kind(
    str,
    "stage1, stage2 or stage3, where wanted with offload after it",
    lambda text: _STAGES.accepts(text) or text in ("stage2 offload", "stage3 offload"),
)
_NAMES = replace(TEXTS, read=str.split)
HISTORY, VIRTUAL_STAGES = replace(SEQUENCES, unit="steps"), replace(RANKS, unit="stages")


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
        doc="with `--use_fp8`: attention in fp8 as well, as TE's recipe option; "
        "[when it pays](../background/fp8.md#attention-in-fp8). Delayed scaling, te: Hopper and newer, heads of "
        "128, sequences of a multiple of 16; no packed documents, no key-value cache",
        zh="配合 `--use_fp8`：attention 也用 fp8（TE 的 recipe 选项），"
        "[何时划算](../background/fp8.md#attention-in-fp8)。仅 delayed scaling；te 需 Hopper 或更新的 GPU，"
        "head 大小 128，序列长度为 16 的倍数；不支持打包的文档和 key-value cache",
        config=True,
        needs={"use_fp8": True, **DELAYED},
        planned=SEARCHED,
    )
    fp8_dpa_bwd: bool = option(
        FLAG,
        default=True,
        help="With fp8_dpa: attention's backward too; false: in the activations' precision.",
        doc="false: attention's backward in the activations' precision (TE's `NVTE_FP8_DPA_BWD=0`)",
        zh="false：attention 的反向用激活的精度（TE 的 `NVTE_FP8_DPA_BWD=0`）",
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
        doc="an expert takes at most so many times its even share of a micro-batch's tokens, those with the greatest "
        "probabilities; the others pass it by. By default experts take all tokens. Megatron's flag",
        zh="一个专家最多处理其平均份额若干倍的 token（概率最大的那些），其余 token 绕过该专家；"
        "默认处理全部 token。与 Megatron 的同名参数相同",
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
        """The numbers of the layers, of so many, that compute in 16 bits while the others do in fp8."""
        return skipped_layers(self.fp8_skip_layers, layers) if self.use_fp8 else frozenset()


@section
class Parallelism:
    """How ranks share the model, its states and the sequences. What the degrees leave is data parallel."""

    tensor_parallel_degree: int = theirs(_DEGREE, default=-1, line="tensor_model_parallel_size")
    pipeline_parallel_degree: int = theirs(_DEGREE, default=-1, line="pipeline_model_parallel_size")
    virtual_pp_degree: int = theirs(VIRTUAL_STAGES, default=1, line="virtual_pipeline_model_parallel_size")
    sequence_parallel: bool = theirs(FLAG, default=False)
    sep_parallel_degree: int = theirs(_DEGREE, default=-1, line="sep_parallel_size")
    context_parallel_degree: int = theirs(_DEGREE, default=-1, line="context_parallel_size")
    expert_parallel_degree: int = theirs(_DEGREE, default=-1)
    expert_tensor_parallel_degree: int = theirs(_DEGREE, default=-1)
    sharding: str = theirs(_SHARDING, default="")
    sharding_degree: int = theirs(_DEGREE, default=-1)
    sharding_parallel_degree: int = theirs(_DEGREE, default=-1, line="sharding_parallel_size")
    sharding_comm_buffer_size_MB: int = theirs(_DEGREE, default=-1)
    sharding_parallel_config: str = theirs(
        TEXT,
        default="",
        doc="PaddleNLP's; [`OVERLAP=1`](../guides/pretrain.md#overlap) sets it. TE's `NVTE_EXT_MARGIN_SM` (GEMMs), "
        "`NVTE_FWD_LAYERNORM_SM_MARGIN` and `NVTE_BWD_LAYERNORM_SM_MARGIN` say how many SMs te leaves to NCCL's "
        "kernels (by default none; on two H200s 16 made a step of 326 ms one of 337, and `NCCL_MAX_CTAS=8` one of 333)",
        zh="PaddleNLP 的选项；`OVERLAP=1` 给出的值见[预训练](../guides/pretrain.md#overlap)。"
        "TE 的变量 `NVTE_EXT_MARGIN_SM`（GEMM）、"
        "`NVTE_FWD_LAYERNORM_SM_MARGIN` 和 `NVTE_BWD_LAYERNORM_SM_MARGIN` 指定 te 留给 NCCL kernel 的 SM 数"
        "（默认不留；在两块 H200 上，留 16 个使一步从 326 ms 变为 337 ms，`NCCL_MAX_CTAS=8` 则为 333 ms）",
    )
    pp_recompute_interval: int = theirs(whole(0, limit=2**16), default=1)


@section
class Precision:
    """What is computed in 16 bits."""

    bf16: bool = theirs(FLAG, default=False)
    fp16: bool = theirs(FLAG, default=False)
    fp16_opt_level: str = theirs(choice("O0", "O1", "O2"), default="O1")
    scale_loss: float = theirs(POSITIVE, default=32768)


@section
class Memory:
    """What the decoder layers keep for backward, where it lies, and what backward computes again."""

    recompute: bool = theirs(FLAG, default=False)
    recompute_granularity: str = theirs(
        choice("full", "core_attn", "full_attn"),
        default="full",
        doc="`full`, `core_attn`; `full_attn` for `none` only",
        zh="`full`、`core_attn`；`full_attn` 仅限 `none`",
    )
    use_fused_linear_cross_entropy: bool = theirs(
        FLAG,
        default=False,
        doc="te and pd: lm_head and loss together, [2048 tokens at a time](../guides/memory.md#a-large-vocabulary); "
        "`none`: "
        "PaddleNLP's own, with its `paddlenlp_kernel`, without TP and PP",
        zh="te 和 pd：lm_head 与 loss 合并，[每次 2048 个 token](../guides/memory.md#a-large-vocabulary)；"
        "`none`：PaddleNLP "
        "自带的实现，需 `paddlenlp_kernel`，不支持 TP 和 PP",
        planned=SEARCHED,
    )
    amp_master_grad: bool = theirs(FLAG, default=False, planned=SEARCHED)
    release_grads: bool = theirs(FLAG, default=False, planned=SEARCHED)

    @property
    def recomputed(self) -> str:
        """The launcher's word for it: none, core_attn or full."""
        return self.recompute_granularity if self.recompute else "none"


WHOLE_LAYERS = {"recompute": True, "recompute_granularity": "full"}


# Flags by which planner and hosts call what they stand for
AGAIN = "recompute_modules"
LAYERS_ON_HOST, STATES_ON_HOST = "offload_activations", "offload_optimizer"


def again(*modules: str) -> dict[str, object]:
    """The flags with which backward computes these parts of each layer again."""
    return {AGAIN: modules}


def in_chunks(tokens: int) -> dict[str, object]:
    """The flag with which the MLP takes so many tokens at a time."""
    return {"mlp_chunk_tokens": tokens}


def stored_in_fp8(on: bool) -> dict[str, object]:
    """The flag with which the input of the MLP's activation is kept in fp8."""
    return {"activation_func_fp8_input_store": on}


@section
class Kernels:
    """Which kernels compute, and how they are launched."""

    use_flash_attention: bool = theirs(FLAG, default=False, line=SILENT)


@section
class Optimizer:
    """What is trained, and how AdamW keeps and updates its states."""

    learning_rate: float = theirs(POSITIVE, default=5e-5)
    lr_scheduler_type: str = theirs(
        choice("linear", "cosine", "constant", "constant_with_warmup", "polynomial"), default="linear"
    )
    warmup_steps: int = theirs(STEPS_OR_NONE, default=0)
    warmup_ratio: float = theirs(FRACTION, default=0.0)
    num_cycles: float = theirs(NOT_NEGATIVE, default=0.5)
    lr_end: float = theirs(NOT_NEGATIVE, default=1e-7)
    power: float = theirs(NOT_NEGATIVE, default=1.0)
    optim: str = theirs(
        choice("adamw", "muon", "adafactor", "adamw_mini", "adamw_custom", "adamw_16bit_moment"),
        default="adamw",
        planned=GIVEN,
    )
    weight_decay: float = theirs(NOT_NEGATIVE, default=0.0)
    adam_beta1: float = theirs(BELOW_ONE, default=0.9)
    adam_beta2: float = theirs(BELOW_ONE, default=0.999)
    adam_epsilon: float = theirs(POSITIVE, default=1e-8)
    max_grad_norm: float = theirs(NOT_NEGATIVE, default=1.0)
    offload_optim: bool = theirs(FLAG, default=False)
    label_smoothing_factor: float = option(
        BELOW_ONE,
        default=0.0,
        doc="in training this share of each label is spread over all words, as torch's `label_smoothing`; "
        "evaluation spreads none, and its loss is lower",
        zh="训练时把标签的这一比例均匀分给所有词，同 torch 的 `label_smoothing`；评估不使用，因此其 loss 较低",
    )
    freeze: tuple[str, ...] | None = option(
        PATTERNS,
        default=None,
        doc="regular expressions: weights in whose names, as checkpoints have them, one of these is found, are not "
        "trained, such as `'embed_tokens|layers\\.[0-3]\\.'`; [what to know](trainer.md#frozen-weights)",
        zh="正则表达式：checkpoint 中名称与之匹配的权重不参与训练，例如 `'embed_tokens|layers\\.[0-3]\\.'`；"
        "[说明](../reference/trainer.md#frozen-weights)",
        planned=GIVEN,
    )
    optim_moments: str = option(
        choice(*MOMENTS),
        default="float32",
        doc="what AdamW keeps its two moments in: `float32`, or with stochastic rounding `bfloat16`, which saves 4 "
        "bytes a parameter, or `int8` with a scale for each 256 elements, which saves 6; "
        "[what to know](../background/optimizer-memory.md)",
        zh="AdamW 两个 moment 的存储格式：`float32`，或采用随机舍入的 `bfloat16`（每个参数节省 4 字节）或 `int8`"
        "（每 256 个元素一个缩放因子，每个参数节省 6 字节）；"
        "[说明](../background/optimizer-memory.md)",
        planned=GIVEN,
    )
    master_weights: str = option(
        choice(*MASTER_WEIGHTS),
        default="float32",
        doc="how AdamW keeps the float32 master weights of bfloat16 weights: `float32`, or `bf16_remainder`, the 16 "
        "bits that the weight itself does not have, which saves 2 bytes a parameter and loses nothing; "
        "[what to know](../background/optimizer-memory.md)",
        zh="AdamW 保存 bfloat16 权重的 float32 主权重的方式：`float32`，或 `bf16_remainder`，即只保存权重本身没有的 "
        "16 位（每个参数节省 2 字节，不损失精度）；[说明](../background/optimizer-memory.md)",
        planned=GIVEN,
    )
    optimizer_in_backward: str = option(
        choice(*IN_BACKWARD),
        default="off",
        doc="updates each weight as soon as backward has its gradient, which is let go then, so that gradients of one "
        "layer exist at a time: `unclipped` (with `--max_grad_norm 0`), or `last_norm`, which clips by the norm of the "
        "step before; [what to know](../background/optimizer-memory.md#the-update-in-backward)",
        zh="反向得到一个权重的梯度后立即更新该权重并释放梯度，因此同时只存在一层的梯度：`unclipped`（配合 "
        "`--max_grad_norm 0`），或 `last_norm`，按上一步的范数裁剪；"
        "[说明](../background/optimizer-memory.md#the-update-in-backward)",
        planned=GIVEN,
    )
    offload_optimizer: float = option(
        FRACTION,
        default=0.0,
        help="Keep this share of AdamW's master weights and moments in pinned host memory, 0 to 1, and copy them to "
        "the "
        "device for each update (backend transformer_engine). Not PaddleNLP's --offload_optim, which copies all of "
        "them and computes nothing meanwhile.",
        doc="te: this share of AdamW's master weights and moments, 0 to 1, lies in pinned host memory, and is copied "
        "to the GPU and back for each update, beside computing. PaddleNLP's `--offload_optim`, which it excludes, "
        "copies all of them to the GPU before the update and back after it. "
        "[What to know](../background/offload.md#the-optimizers-states)",
        zh="te：AdamW 的主权重和 moment 中的这一比例（0 到 1）放在锁页的主机内存中，每次更新时拷贝到 GPU 再拷回，"
        "与计算同时进行。PaddleNLP 的 `--offload_optim` 在更新前把全部状态拷到 GPU、更新后拷回；二者不能同用。"
        "[说明](../background/offload.md#the-optimizers-states)",
        planned=SEARCHED,
    )


@section
class Run:
    """How a run goes on, evaluates, saves and ends."""

    output_dir: str = theirs(PATH, default=REQUIRED)
    logging_dir: str | None = theirs(PATH, default=None)
    output_signal_dir: str | None = theirs(PATH, default=None)
    resume_from_checkpoint: str | None = theirs(PATH, default=None)
    device: str = theirs(TEXT, default="gpu")
    seed: int = theirs(SEED, default=42)
    do_train: bool = theirs(FLAG, default=False)
    do_eval: bool = theirs(FLAG, default=False)
    do_predict: bool = theirs(FLAG, default=False)
    do_export: bool = theirs(FLAG, default=False)
    per_device_train_batch_size: int = theirs(SEQUENCES, default=8)
    per_device_eval_batch_size: int = theirs(SEQUENCES, default=8)
    gradient_accumulation_steps: int = theirs(MICRO_BATCHES, default=1)
    eval_accumulation_steps: int | None = theirs(STEPS, default=None)
    num_train_epochs: float = theirs(POSITIVE, default=1.0)
    max_steps: int = theirs(_MOST_STEPS, default=-1)
    max_evaluate_steps: int = theirs(_MOST_STEPS, default=-1)
    dataloader_num_workers: int = theirs(whole(0, limit=1024), default=0)
    logging_steps: int = theirs(STEPS, default=500)
    save_steps: int = theirs(STEPS, default=500)
    save_strategy: str = theirs(TEXT, default="steps")
    save_total_limit: int | None = theirs(STEPS_OR_NONE, default=None)
    ordered_save_group_size: int = theirs(whole(0, limit=2**16), default=0)
    unified_checkpoint: bool = theirs(FLAG, default=False)
    unified_checkpoint_config: str = theirs(TEXT, default="")
    use_async_save: bool = theirs(FLAG, default=False)
    evaluation_strategy: str = theirs(TEXT, default="no")
    eval_steps: int | None = theirs(STEPS_OR_NONE, default=None)
    load_best_model_at_end: bool = theirs(FLAG, default=False)
    metric_for_best_model: str | None = theirs(TEXT, default=None)
    greater_is_better: bool | None = theirs(FLAG, default=None)
    report_to: tuple[str, ...] | None = theirs(_NAMES, default=None)
    minimum_eval_times: int | None = theirs(STEPS_OR_NONE, default=None)
    count_trained_tokens: bool = theirs(FLAG, default=False)
    bf16_full_eval: bool = theirs(FLAG, default=False)
    fp16_full_eval: bool = theirs(FLAG, default=False)
    data_seed: int | None = option(
        SEED,
        default=None,
        help="Seed of the order in which samples are read; default: --seed, which also decides on new weights and "
        "dropout.",
        doc="seed of the order of the samples; `--seed` also decides on new weights and dropout",
        zh="样本顺序的随机种子；`--seed` 还决定新权重的初始化和 dropout",
        shown="`--seed`",
        shown_zh="`--seed`",
    )
    early_stopping_patience: int | None = option(
        STEPS,
        default=None,
        help="End training after so many evaluations in a row without improvement. Default: it goes on.",
        doc="ends training when `--metric_for_best_model`, by default the loss, has not improved in so many "
        "evaluations in a row; [what to know](trainer.md#early-stopping)",
        zh="`--metric_for_best_model`（默认为 loss）连续这么多次评估未改善时结束训练；"
        "[说明](../reference/trainer.md#early-stopping)",
        shown="off",
        shown_zh="关闭",
    )
    staging_dir: str | None = option(
        PATH,
        default=None,
        doc="each node writes its part of a checkpoint to this folder, such as `/dev/shm` (memory) or one on a local "
        "NVMe, and from there to the output folder while training goes on; "
        "[what to know](../guides/reliability.md#saving-in-the-background)",
        zh="各节点先把其部分 checkpoint 写到此文件夹，例如 `/dev/shm`（内存）或本地 NVMe 上的文件夹，"
        "训练继续的同时再写到输出文件夹；[说明](../guides/reliability.md#saving-in-the-background)",
        shown="off",
        shown_zh="关闭",
    )
    on_nan: str = option(
        choice("stop", "skip", "rollback"),
        default="stop",
        doc="where the loss, the gradients or a tensor to be saved are not finite: `stop` with status 1, `skip` (leave "
        "the step out, at most 10 in a row) or `rollback` (status 75: the next start goes on from the last good "
        "checkpoint, without the batches since, at most 10 times from one checkpoint)",
        zh="loss、梯度或待保存的张量出现 NaN 或无穷大时：`stop` 以状态 1 结束，`skip` 跳过该步（最多连续 10 步），"
        "`rollback` 以状态 75 结束，下次启动从最近的完好 checkpoint 继续，并跳过其后的数据"
        "（同一 checkpoint 最多 10 次）",
    )
    spike_factor: float | None = option(
        number("a number above 1, such as 1.5", lambda x: x > 1),
        default=None,
        doc="treats a loss above so many times the median of the last 100 losses as `--on_nan` says",
        zh="loss 超过最近 100 步中位数的这一倍数时，按 `--on_nan` 处理",
        shown="off",
        shown_zh="关闭",
    )
    fp8_statistics: int = option(
        STEPS_OR_NONE,
        default=0,
        help="Every N steps count for each tensor that becomes fp8 what vanishes, what is cut off and how far numbers "
        "move; 0: never.",
        doc="every N steps count for each tensor that becomes fp8 how many numbers vanish, how many are cut off and "
        "how far all move; [how to read it](../background/fp8.md#is-it-healthy)",
        zh="每 N 步统计每个转为 fp8 的张量：多少数变为零、多少数被截断、误差多大；"
        "[如何解读](../background/fp8.md#is-it-healthy)",
        shown="off",
        shown_zh="关闭",
        needs={"use_fp8": True},
    )
    fp8_fallback: str = option(
        FALLBACK,
        default="",
        doc="with `--fp8_statistics`: beyond such shares of a tensor's numbers `warn`, or let its layer compute in 16 "
        "bits from the next step on (`bf16`), as `bf16:underflows=0.3,saturated=0.01,relative_error=0.2`; "
        "[what to know](../background/fp8.md#is-it-healthy)",
        zh="配合 `--fp8_statistics`：张量的比例超过限值时告警（`warn`），或从下一步起让所在的层以 16 位计算（`bf16`），"
        "如 `bf16:underflows=0.3,saturated=0.01,relative_error=0.2`；"
        "[说明](../background/fp8.md#is-it-healthy)",
        shown="off",
        shown_zh="关闭",
        needs={"use_fp8": True},
    )
    verify_checkpoint: str = option(
        choice(*LEVELS),
        default="full",
        doc="what a folder with a manifest must agree with it in before a run resumes from it, or takes its weights or "
        "adapter: `full` (sizes and checksums), `size`, `none`",
        zh="恢复训练或读取权重、adapter 之前，带有 manifest 的文件夹须与其一致的内容："
        "`full`（大小与校验和）、`size`（大小）、`none`",
    )


@section
class Schedule:
    """The learning rate and the evaluations of pretraining."""

    min_learning_rate: float = option(
        NOT_NEGATIVE,
        default=1e-5,
        doc="learning rate at the end of the decay",
        zh="学习率衰减的终点",
        line=HOSTED,
    )
    decay_steps: int | None = option(
        STEPS,
        default=None,
        help="Steps of the decay; afterwards min_learning_rate. Default: max_steps.",
        doc="steps of the decay; afterwards `--min_learning_rate`",
        zh="学习率衰减的步数，之后为 `--min_learning_rate`",
        shown="max_steps",
        line=SAME,
    )
    eval_iters: int = option(
        STEPS,
        default=10,
        help="Batches of one evaluation.",
        doc="batches of an evaluation",
        zh="一次评估的 batch 数",
        line=SAME,
    )


@section
class PretrainModel:
    """Which model is pretrained, and where its weights come from."""

    model_name_or_path: str = option(
        PATH,
        default="tiny-llama-demo",
        help="A built-in configuration's name or a folder with config.json.",
        doc="built-in name or folder",
        zh="内置名称或文件夹",
        line=SILENT,
    )
    tokenizer_name_or_path: str | None = option(
        PATH_OR_EMPTY,
        default=None,
        help="Tokenizer folder or name; none with --mock_data. Default: model_name_or_path.",
        doc="folder, name, or `none` with `--mock_data`",
        zh="文件夹、名称，`--mock_data` 时可为 `none`",
        shown="the model",
        shown_zh="同模型",
        line=SILENT,
    )
    te_init_weight_path: str | None = option(
        PATH,
        default=None,
        help="Folder with initial weights, in this backend's layout (te_llama_ckpt_converter.py) or Hugging Face's.",
        doc="folder of initial weights, in this backend's layout or Hugging Face's",
        zh="初始权重所在文件夹，须为该后端或 Hugging Face 的布局",
        line=SILENT,
    )
    continue_training: bool = option(
        FLAG,
        default=False,
        help="Start from the weights in model_name_or_path instead of from scratch.",
        doc="start from the weights in `model_name_or_path`",
        zh="从 `model_name_or_path` 中的权重开始",
        line=SILENT,
    )
    fuse_attention_qkv: bool = option(
        FLAG,
        default=False,
        help="Native layers: one weight for q, k and v.",
        doc="`none`: one weight for q, k and v",
        zh="`none`：q、k、v 合为一个权重",
        config=True,
        line=SILENT,
    )
    fuse_attention_ffn: bool = option(
        FLAG,
        default=False,
        help="Native layers: one weight for gate and up.",
        doc="`none`: one weight for gate and up",
        zh="`none`：gate、up 合为一个权重",
        config=True,
        line=SILENT,
    )


@section
class PretrainData:
    """What pretraining reads."""

    input_dir: str | None = option(
        TEXT,
        default=None,
        help="Folder of .bin/.idx pairs made by paddle-te prepare-data; several are blended with equal weights. Or "
        "weights "
        "and prefixes in turn: '0.3 data/a 0.7 data/b'.",
        doc='folder of `.bin`/`.idx` pairs; or weights and prefixes: `"0.3 data/a 0.7 data/b"`',
        zh='`.bin`/`.idx` 所在文件夹；或权重与前缀：`"0.3 data/a 0.7 data/b"`',
        line=SILENT,
    )
    split: str = option(
        SPLIT,
        default="949,50,1",
        doc="train, validation, test: proportions of the documents",
        zh="训练、验证、测试集的文档比例",
        line=SAME,
    )
    max_seq_length: int = option(
        TOKENS,
        default=1024,
        help="Tokens in a sequence.",
        doc="tokens of a sequence",
        zh="序列的 token 数",
        line="max_seq_len",
    )
    reset_attention_mask: bool = option(
        FLAG,
        default=False,
        doc="the documents in a sequence do not see each other; each ends with the eos token "
        "([how](../background/packing.md)); not with `--fp8_dpa`",
        zh="同一序列中的文档互不可见，文档以 eos token 结尾（[说明](../background/packing.md)）；不能与 "
        "`--fp8_dpa` 同用",
        line=HOSTED,
    )
    reset_position_ids: bool = option(
        FLAG,
        default=False,
        doc="positions begin anew with each document",
        zh="每个文档的位置编号从头开始",
        line=HOSTED,
    )
    eod_mask_loss: bool = option(
        FLAG,
        default=False,
        help="No loss where the input is the token that ends a document: it cannot tell how the next document begins.",
        doc="no loss where the input is the eos token that ends a document",
        zh="输入为文档结尾的 eos token 处不计损失",
    )
    share_folder: bool = option(
        FLAG,
        default=False,
        doc="the data folder is shared by all machines: the first one builds the indices",
        zh="所有机器共享数据文件夹：由第一台建立索引",
        line=SAME,
    )
    data_cache: str | None = option(
        PATH,
        default=None,
        help="Folder for the indices of samples; default: index-cache next to the data or, where that cannot be "
        "written, in "
        "the output folder.",
        doc="folder for the indices of samples",
        zh="样本索引的文件夹",
        shown="next to the data",
        shown_zh="数据旁边",
    )
    mock_data: bool = option(
        FLAG,
        default=False,
        help="Train on random tokens instead of data, for benchmarks; no input_dir.",
        doc="random tokens",
        zh="随机 token",
        line=HOSTED,
    )


_TRAINED = options_of(Layers, Parallelism, Precision, Memory, Kernels, Optimizer, Run)
PADDLENLPS = tuple(each for each in _TRAINED if each.source)
BOUNDS = {option.name: option.kind for option in PADDLENLPS}
# Ours: what decides on the decoder layers, and how a run goes on and saves, of all training
LAYERS = tuple(each for each in _TRAINED if each.config)
TRAINING = tuple(each for each in _TRAINED if not each.config and not each.source)
LAYER_OPTIONS = {option.name: option for option in LAYERS}
PRETRAINING, PRETRAIN_MODEL, PRETRAIN_DATA = map(options_of, (Schedule, PretrainModel, PretrainData))


@record
class LayerOptions(Record, Layers):
    """What a model's configuration says of its decoder layers: LayerOptions.of(config).fp8_recipe.

    fuse_wgrad_accumulation follows from other flags, see `runs.main_gradients`.
    """

    fuse_wgrad_accumulation: bool = False

    @classmethod
    def of(cls, config: object) -> LayerOptions:
        """Read a configuration; what it does not say, such as Hugging Face's, means the default."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls) if hasattr(config, each.name)})


# Losses of pairs of answers; `training.preference_loss` has their formulas
LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo", "or", "orpo", "dpop", "sppo_hard", "nca_pair", "kto_pair")
NO_REFERENCE = ("simpo", "or", "orpo")  # the losses that compare with no other model


@section
class TunedModel:
    """Which model is tuned."""

    model_name_or_path: str = option(
        PATH,
        default=REQUIRED,
        doc="folder; weights in the backend's layout or Hugging Face's",
        zh="文件夹；权重须为该后端或 Hugging Face 的布局",
        shown="–",
        line=SILENT,
    )
    tokenizer_name_or_path: str | None = option(
        PATH_OR_EMPTY,
        default=None,
        help="Tokenizer folder or name. Default: model_name_or_path.",
        doc="folder or name",
        zh="文件夹或名称",
        shown="the model",
        shown_zh="同模型",
        line=SILENT,
    )


@section
class FinetuneModel(TunedModel, LoRA):
    """Which model is fine-tuned, and which of its weights are trained."""


@section
class TuningData:
    """What all tuning reads."""

    dataset_name_or_path: str | None = option(
        PATH,
        default=None,
        help="Folder of train* and dev* or validation*: JSON lines or arrays, Parquet, or what datasets' save_to_disk "
        "writes.",
        doc="folder of `train*` and `dev*` or `validation*`; [forms and formats](../guides/fine-tune.md#data)",
        zh="含 `train*` 以及 `dev*` 或 `validation*` 的文件夹；[格式](../guides/fine-tune.md#data)",
        shown="–",
        line=SILENT,
    )
    chat_template: str | None = option(
        PATH,
        default=None,
        help="File of a chat template in Jinja; none: questions and answers without one. By default the tokenizer's "
        "own.",
        doc="file of a Jinja template; `none`: no template; see [conversations](../guides/fine-tune.md#data)",
        zh="Jinja 模板文件；`none`：不用模板；见[对话](../guides/fine-tune.md#data)",
        shown="the tokenizer's",
        shown_zh="tokenizer 自带",
    )
    greedy_zero_padding: bool = option(
        FLAG,
        default=False,
        doc="pack tighter, in another order",
        zh="打包得更紧，顺序会改变",
        needs={"zero_padding": True},
        line="greedy_intokens",
    )


@section
class FinetuneData(TuningData):
    """What fine-tuning reads."""

    src_length: int = option(
        TOKENS,
        default=1024,
        doc="without a chat template: tokens of `src` at most; of a longer one the end is kept",
        zh="不用对话模板时 `src` 的最大 token 数；更长时保留末尾",
        line=HOSTED,
    )
    max_length: int = option(
        TOKENS,
        default=2048,
        doc="tokens of a sample at most; a longer conversation is cut after an answer, or without a template in it",
        zh="样本的最大 token 数；更长的对话在某轮回答之后截断，不用模板时回答被截断",
        line="max_seq_len",
    )
    pad_to_multiple_of: int = option(
        TOKENS,
        default=16,
        doc="batches are as long as their longest sample, rounded up; fp8 needs a multiple of 16, `block` of 128",
        zh="batch 长度取最长样本并向上取整；fp8 须为 16 的倍数，block scaling 时为 128",
        line=HOSTED,
    )
    pad_to_max_length: bool = option(
        FLAG,
        default=False,
        help="Pad every batch to max_length instead.",
        doc="all batches as long as `--max_length`; sequence parallelism needs it",
        zh="所有 batch 填充到 `--max_length`；序列并行时必需",
    )
    zero_padding: bool = option(
        FLAG,
        default=False,
        help="Pack several samples into one sequence of max_length.",
        doc="pack samples into sequences of `--max_length`; they do not see each other, and each has positions of its "
        "own ([how](../background/packing.md)); not with `--fp8_dpa`",
        zh="把多个样本打包成 `--max_length` 的序列；样本之间互不可见，位置编号各自从头开始"
        "（[说明](../background/packing.md)）；不能与 `--fp8_dpa` 同用",
        line="packing",
    )


@section
class PreferenceData(TuningData):
    """What preference tuning reads."""

    train_dataset_path: str | None = option(
        PATH,
        default=None,
        help="File of preferences to train on, instead of a folder in --dataset_name_or_path. PaddleNLP's name.",
        doc="file to train on, instead of `--dataset_name_or_path`; [forms](../guides/preferences.md#data)",
        zh="训练文件，代替 `--dataset_name_or_path`；[格式](../guides/preferences.md#data)",
        shown="–",
    )
    dev_dataset_path: str | None = option(
        PATH,
        default=None,
        help="File of preferences to evaluate on. PaddleNLP's name.",
        doc="file to evaluate on",
        zh="评估文件",
        shown="–",
    )
    max_seq_len: int = option(
        TOKENS,
        default=4096,
        doc="tokens of a packed row, and at most of a pair: both answers, each with its question; longer ones are left "
        "out",
        zh="打包序列的 token 数，也是一对回答（各含其问题）的上限；更长的被略去",
    )
    max_prompt_len: int = option(
        TOKENS,
        default=2048,
        doc="tokens of a question at most; pairs with a longer one are left out",
        zh="问题的最大 token 数；更长的被略去",
    )


@section
class Preference:
    """How answers are compared with those of a reference."""

    beta: float = option(
        POSITIVE,
        default=0.1,
        doc="strength of the bond to the reference; rewards are beta times the difference of log-probabilities",
        zh="与参考模型的约束强度；reward 为 beta 乘以对数概率之差",
    )
    precompute_ref_log_probs: bool = option(
        FLAG,
        default=False,
        doc="compute the reference's log-probabilities once, before training, and keep them in `--output_dir`; full "
        "tuning then needs no second model",
        zh="训练前一次性计算参考模型的对数概率，保存在 `--output_dir` 中；全参数训练因此不需要第二个模型",
    )


@section
class PairPreference(Preference):
    """The losses of pairs of answers."""

    loss_type: str = option(
        choice(*LOSS_TYPES),
        default="sigmoid",
        doc="the loss of a pair; [formulas](../guides/preferences.md#losses)",
        zh="一对回答的损失；[公式](../guides/preferences.md#losses)",
    )
    label_smoothing: float = option(
        number("a number of at least 0 and below 0.5", lambda x: 0 <= x < 0.5),
        default=0.0,
        doc="with `sigmoid` and `simpo`: the chance that a pair is the wrong way round",
        zh="用于 `sigmoid` 和 `simpo`：一对回答标反的概率",
    )
    simpo_gamma: float = option(
        NOT_NEGATIVE,
        default=0.5,
        doc="with `simpo`: the margin by which the better answer should be likelier",
        zh="用于 `simpo`：较好回答应高出的 margin",
        needs={"loss_type": "simpo"},
    )
    dpop_lambda: float = option(
        NOT_NEGATIVE,
        default=50.0,
        doc="with `dpop`: weight of what keeps the better answer as likely as under the reference",
        zh="用于 `dpop`：使较好回答的概率不低于参考模型的惩罚项权重",
        needs={"loss_type": "dpop"},
    )
    pref_loss_ratio: float = option(
        NOT_NEGATIVE,
        default=1.0,
        doc="weight of the loss of pairs",
        zh="成对损失的权重",
    )
    sft_loss_ratio: float = option(
        NOT_NEGATIVE,
        default=0.0,
        doc="weight of the better answers' own loss, the mean over their tokens, beside it",
        zh="较好回答自身损失（按 token 平均）的权重",
    )
    reference_free: bool = option(
        FLAG,
        default=False,
        doc="compare with no reference, as if it gave all answers the same probability",
        zh="不使用参考模型，视其对所有回答给出相同概率",
    )
    ref_model_update_steps: int = option(
        _DEGREE,
        default=-1,
        doc="full tuning: every so many steps the reference takes the trained weights; checkpoints must be saved at a "
        "multiple of it",
        zh="全参数训练：每隔若干步把训练中的权重复制给参考模型；保存 checkpoint 的步数须为其倍数",
    )


@section
class SinglePreference(Preference):
    """KTO's loss, of single answers."""

    desirable_weight: float = option(NOT_NEGATIVE, default=1.0, doc="weight of wanted answers", zh="好的回答的权重")
    undesirable_weight: float = option(NOT_NEGATIVE, default=1.0, doc="weight of the others", zh="其余回答的权重")


FINETUNE_MODEL, FINETUNE_DATA = options_of(FinetuneModel), options_of(FinetuneData)
_OF = {option.name: option for option in (*LAYERS, *TRAINING, *FINETUNE_MODEL, *FINETUNE_DATA)}
DPO, KTO, PREFERENCE_DATA = map(options_of, (PairPreference, SinglePreference, PreferenceData))

_THEIRS = {option.name: option for option in PADDLENLPS}
EVALUATED_MODEL = (
    _OF["model_name_or_path"],
    _OF["tokenizer_name_or_path"],
    Option(
        "lora_path",
        PATH,
        None,
        "Folder of a LoRA adapter, ours, PaddleNLP's or PEFT's, which is added to the weights.",
        doc="adapter, of any backend or PEFT's, added to the weights",
        zh="adapter（任意后端或 PEFT 的），合并到权重中",
    ),
    _OF["transformer_engine_backend"].but(help="none, paddle or transformer_engine."),
    Option(
        "dtype",
        choice(*DTYPES),
        "float32",
        doc="of the weights: `float32`, `bfloat16`, `float16` (te: not `float32`)",
        zh="权重的类型：`float32`、`bfloat16`、`float16`（te 不支持 `float32`）",
    ),
    _THEIRS["device"].but(
        source="", default="cpu", help="cpu, gpu or nvgpu.", doc="`cpu`, `gpu`, `nvgpu`", zh="`cpu`、`gpu`、`nvgpu`"
    ),
    _OF["verify_checkpoint"].but(
        doc="what a folder with a manifest must agree with it in before it is read: `full` (sizes and checksums), "
        "`size`, `none`",
        zh="读取之前，带有 manifest 的文件夹须与其一致的内容：`full`（大小与校验和）、`size`（大小）、`none`",
    ),
    _OF["use_fp8"],
    _OF["fp8_recipe"].but(
        default="current",
        help="current, or delayed: with the scales that the checkpoint's training left.",
        doc="`current`; `delayed` needs the `fp8_state` that training left next to the weights",
        zh="`current`；`delayed` 需要训练时保存在权重旁边的 `fp8_state` 文件",
    ),
    _OF["fp8_dpa"].but(
        doc="attention in fp8 as well, as the checkpoint was trained (delayed scaling)",
        zh="attention 也用 fp8，与训练时相同（delayed scaling）",
    ),
    _OF["fp8_lm_head"].but(
        help="The language model's head in fp8 as well, as the checkpoint was trained.",
        doc="lm_head in fp8 as well, as the checkpoint was trained",
        zh="lm_head 也用 fp8，与训练时相同",
    ),
    Option(
        "max_seq_length",
        TOKENS,
        None,
        "Tokens that the model sees. Default: its seq_length.",
        doc="tokens that the model sees",
        zh="模型能看到的 token 数",
        shown="what it was trained with; 2048 for Hugging Face's",
        shown_zh="训练时的长度；Hugging Face 的模型为 2048",
    ),
    Option(
        "batch_size",
        SEQUENCES,
        8,
        doc="sequences computed together",
        zh="一起计算的序列数",
    ),
    _THEIRS["pipeline_parallel_degree"].but(
        source="",
        kind=RANKS,
        default=1,
        help="Groups of layers, each with its share of the processes; the rest is tensor parallelism.",
        doc="of several processes: into so many groups of layers the model is divided; the rest is tensor parallelism",
        zh="多个进程时，模型按层分为若干段；其余为张量并行",
    ),
    _OF["chat_template"].but(
        doc="file of a Jinja template; `none`: no template; see [chats](../guides/generate.md#chats)",
        zh="Jinja 模板文件；`none`：不用模板；见[对话](../guides/fine-tune.md#data)",
    ),
    Option(
        "chat_template_kwargs",
        TEXT,
        None,
        'JSON object of further variables of the chat template, such as {"enable_thinking": false}.',
        doc="further variables of the template, a JSON object: `'{\"enable_thinking\": false}'`",
        zh="模板的其他变量，JSON 对象：`'{\"enable_thinking\": false}'`",
    ),
)
EVALUATION_TASKS = (
    Option(
        "perplexity",
        PATH,
        None,
        doc='JSON lines `{"text"}`, [conversations](../guides/generate.md#chats), whose answers count, or a prefix of '
        "`.bin`/`.idx`",
        zh='JSON lines `{"text"}`；[对话](../guides/fine-tune.md#data)，只计回答；或 `.bin`/`.idx` 的前缀',
    ),
    Option(
        "boolq",
        PATH,
        None,
        doc='JSON lines `{"passage", "question", "answer"}`, SuperGLUE\'s',
        zh='JSON lines `{"passage", "question", "answer"}`，同 SuperGLUE',
    ),
    Option(
        "lambada",
        PATH,
        None,
        doc='JSON lines `{"text"}`; the last word is asked for',
        zh='JSON lines `{"text"}`，预测最后一个词',
    ),
    Option(
        "multiple_choice",
        PATH,
        None,
        doc='JSON lines `{"query", "choices", "gold"}`',
        zh='JSON lines `{"query", "choices", "gold"}`',
    ),
    Option(
        "lm_eval",
        TEXTS,
        None,
        doc="tasks of EleutherAI's harness: names, or `.yaml` files (`pip install 'paddle_te[harness]'`)",
        zh="EleutherAI harness 的任务：名称或 `.yaml` 文件（`pip install 'paddle_te[harness]'`）",
    ),
    Option(
        "limit",
        SAMPLES,
        None,
        "Read no more than so many examples (windows of a .bin/.idx pair).",
        doc="examples, or windows of a `.bin`/`.idx` pair",
        zh="样本数，或 `.bin`/`.idx` 的窗口数",
        shown="all",
        shown_zh="全部",
    ),
    Option(
        "prompts",
        TEXTS,
        None,
        doc="texts to continue, with a key-value cache; te in bfloat16",
        zh="要续写的文本，使用 KV cache；te 用 bfloat16",
    ),
    Option(
        "prompts_file",
        PATH,
        None,
        doc='file of prompts: [conversations](../guides/generate.md#chats), or `{"text"}`',
        zh='存放 prompt 的文件：[对话](../guides/fine-tune.md#data)，或 `{"text"}`',
    ),
    Option(
        "apply_chat_template",
        FLAG,
        False,
        doc="make a [chat](../guides/generate.md#chats) of each prompt that is a text, and of the harness's prompts",
        zh="把每个文本 prompt 以及 harness 的 prompt 变为[对话](../guides/fine-tune.md#data)",
    ),
    Option(
        "system_instruction",
        TEXT,
        None,
        doc="the system's turn of chats that have none",
        zh="没有 system 轮的对话所用的 system 内容",
    ),
    Option("max_new_tokens", TOKENS, 32, doc="length of a continuation", zh="续写长度"),
    Option(
        "temperature",
        NOT_NEGATIVE,
        0.0,
        doc="0: the likeliest token each time; above 0: sampling, from logits that are divided by it",
        zh="0：每次取概率最高的 token；大于 0：sampling，logits 除以该值",
    ),
    Option(
        "top_k",
        whole(0, limit=2**31 - 1),
        0,
        doc="sampling: from so many likeliest tokens; 0: all",
        zh="sampling：从概率最高的若干 token 中抽取；0：全部",
    ),
    Option(
        "top_p",
        FRACTION,
        1.0,
        doc="sampling: from the likeliest tokens that have this probability together",
        zh="sampling：从累计概率达到该值的 token 中抽取",
    ),
    _THEIRS["seed"].but(source="", default=42, doc="of sampling", zh="sampling 的随机种子"),
    Option(
        "output_file",
        PATH,
        None,
        doc="JSON file for the results",
        zh="存放结果的 JSON 文件",
    ),
)
