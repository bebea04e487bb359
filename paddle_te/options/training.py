"""The flags of all training beside the decoder layers: ours, and PaddleNLP's that we check or read.

A section has what belongs together, ours and PaddleNLP's (`theirs`). `paddle_te.job` makes the record of a run of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from paddle_te.options.fp8 import FALLBACK
from paddle_te.options.option import (
    BELOW_ONE,
    FLAG,
    FRACTION,
    GIVEN,
    MICRO_BATCHES,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    RANKS,
    REQUIRED,
    SEARCHED,
    SEED,
    SEQUENCES,
    SILENT,
    STEPS,
    STEPS_OR_NONE,
    TEXT,
    TEXTS,
    Kind,
    choice,
    number,
    option,
    options_of,
    section,
    theirs,
    whole,
)

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
# A flag by which planner and hosts call what it stands for
STATES_ON_HOST = "offload_optimizer"


def chosen(kept: object, flags: Iterable[str]) -> list[str]:
    """Return those of STATES or OPTIMIZER that are not at their default, as on a command line.

    kept: has an attribute for each.
    """
    return [f"--{name} {kind}" for name in flags if (kind := getattr(kept, name)) != OPTIMIZER_DEFAULTS[name]]


def _are_patterns(texts: Iterable[str]) -> bool:
    try:
        return all(text != "" and re.compile(text) for text in texts)
    except (re.error, RecursionError, OverflowError):
        return False


PATTERNS = Kind(TEXTS.type, "regular expressions of Python's re", _are_patterns)
# PaddleNLP's -1 for "not given" stays allowed where it means that.
_NOT_GIVEN = Kind(int, "-1 (not given) or a whole number of at least 1", lambda n: n == -1 or n >= 1, whole(0).read)
DEGREE, _MOST_STEPS = replace(_NOT_GIVEN, limits=RANKS.limits), replace(_NOT_GIVEN, limits=STEPS.limits)
_STAGES = choice("", "stage1", "stage2", "stage3")
_SHARDING = Kind(
    str,
    "stage1, stage2 or stage3, where wanted with offload after it",
    lambda text: _STAGES.accepts(text) or text in ("stage2 offload", "stage3 offload"),
)
_NAMES = replace(TEXTS, read=str.split)
VIRTUAL_STAGES = replace(RANKS, unit="stages")


@section
class Parallelism:
    """How ranks share the model, its states and the sequences. What the degrees leave is data parallel."""

    tensor_parallel_degree: int = theirs(DEGREE, default=-1, line="tensor_model_parallel_size")
    pipeline_parallel_degree: int = theirs(DEGREE, default=-1, line="pipeline_model_parallel_size")
    virtual_pp_degree: int = theirs(VIRTUAL_STAGES, default=1, line="virtual_pipeline_model_parallel_size")
    sequence_parallel: bool = theirs(FLAG, default=False)
    sep_parallel_degree: int = theirs(DEGREE, default=-1, line="sep_parallel_size")
    context_parallel_degree: int = theirs(DEGREE, default=-1, line="context_parallel_size")
    expert_parallel_degree: int = theirs(DEGREE, default=-1)
    expert_tensor_parallel_degree: int = theirs(DEGREE, default=-1)
    sharding: str = theirs(_SHARDING, default="")
    sharding_degree: int = theirs(DEGREE, default=-1)
    sharding_parallel_degree: int = theirs(DEGREE, default=-1, line="sharding_parallel_size")
    sharding_comm_buffer_size_MB: int = theirs(DEGREE, default=-1)
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


_SECTIONS = options_of(Parallelism, Precision, Memory, Kernels, Optimizer, Run)
PADDLENLPS = tuple(each for each in _SECTIONS if each.source)
BOUNDS = {option.name: option.kind for option in PADDLENLPS}
TRAINING = tuple(each for each in _SECTIONS if not each.source)
