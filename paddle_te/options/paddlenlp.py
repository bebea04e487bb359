"""What PaddleNLP's flags may be, which its Trainer takes without looking, and what we say about some of them.

A flag that is not here is passed on as it is. PaddleNLP's -1 for "not given" stays allowed where it means that.
"""

from dataclasses import replace

from paddle_te.options.option import (
    BELOW_ONE,
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    RANKS,
    SEED,
    SEQUENCES,
    STEPS,
    STEPS_OR_NONE,
    TEXT,
    Kind,
    Option,
    choice,
    whole,
)
from paddle_te.options.removed import asks_for_nothing, without_removed

_NOT_GIVEN = Kind(int, "-1 (not given) or a whole number of at least 1", lambda n: n == -1 or n >= 1)
_DEGREE, _MOST_STEPS = replace(_NOT_GIVEN, limits=RANKS.limits), replace(_NOT_GIVEN, limits=STEPS.limits)
_STAGES = choice("", "stage1", "stage2", "stage3")
_SHARDING = Kind(
    str,
    "stage1, stage2 or stage3, where wanted with offload after it",
    lambda text: _STAGES.accepts(text) or text in ("stage2 offload", "stage3 offload"),
)


def _bounds(kind, *names):
    return [Option(name, kind) for name in names]


PADDLENLP = (
    Option(
        "sharding_parallel_config",
        TEXT,
        "",
        doc="PaddleNLP's; what `OVERLAP=1` gives is [above](#overlap). TE's variables `NVTE_EXT_MARGIN_SM` (GEMMs), "
        "`NVTE_FWD_LAYERNORM_SM_MARGIN` and `NVTE_BWD_LAYERNORM_SM_MARGIN` say how many SMs te leaves to NCCL's "
        "kernels (by default none; on two H200s 16 made a step of 326 ms one of 337, and `NCCL_MAX_CTAS=8` one of 333)",
        zh="PaddleNLP 的选项；`OVERLAP=1` 给出的值见[上文](#通信重叠)。TE 的变量 `NVTE_EXT_MARGIN_SM`（GEMM）、"
        "`NVTE_FWD_LAYERNORM_SM_MARGIN` 和 `NVTE_BWD_LAYERNORM_SM_MARGIN` 指定 te 留给 NCCL kernel 的 SM 数"
        "（默认不留；在两块 H200 上，留 16 个使一步从 326 ms 变为 337 ms，`NCCL_MAX_CTAS=8` 则为 333 ms）",
    ),
    Option(
        "use_fused_linear_cross_entropy",
        FLAG,
        False,
        doc="te and pd: lm_head and loss together, [2048 tokens at a time](../../docs/faq.md#out-of-memory); `none`: "
        "PaddleNLP's own, with its `paddlenlp_kernel`, without TP and PP",
        zh="te 和 pd：lm_head 与 loss 合并，[每次 2048 个 token](../../docs/faq.md#out-of-memory)；`none`：PaddleNLP "
        "自带的实现，需 `paddlenlp_kernel`，不支持 TP 和 PP",
    ),
    Option(
        "recompute_granularity",
        choice("full", "core_attn", "full_attn"),
        "full",
        doc="`full`, `core_attn`; `full_attn` for `none` only",
        zh="`full`、`core_attn`；`full_attn` 仅限 `none`",
    ),
    *_bounds(POSITIVE, "learning_rate", "num_train_epochs", "scale_loss", "adam_epsilon"),
    *_bounds(NOT_NEGATIVE, "weight_decay", "max_grad_norm", "lr_end", "num_cycles", "power"),
    *_bounds(BELOW_ONE, "adam_beta1", "adam_beta2"),
    *_bounds(FRACTION, "warmup_ratio"),
    *_bounds(SEQUENCES, "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *_bounds(STEPS, "save_steps", "logging_steps", "eval_accumulation_steps"),
    *_bounds(STEPS_OR_NONE, "warmup_steps", "save_total_limit", "minimum_eval_times", "eval_steps"),
    *_bounds(whole(0, limit=1024), "dataloader_num_workers"),
    *_bounds(RANKS, "virtual_pp_degree"),
    *_bounds(whole(0, limit=2**16), "pp_recompute_interval", "ordered_save_group_size"),
    *_bounds(PATH, "output_dir", "logging_dir", "output_signal_dir", "resume_from_checkpoint"),
    *_bounds(SEED, "seed"),
    *_bounds(_MOST_STEPS, "max_steps", "max_evaluate_steps"),
    *_bounds(_DEGREE, "sharding_degree", "sharding_parallel_degree"),
    *_bounds(_DEGREE, "tensor_parallel_degree", "pipeline_parallel_degree", "sep_parallel_degree"),
    *_bounds(_DEGREE, "context_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree"),
    *_bounds(_DEGREE, "sharding_comm_buffer_size_MB"),
    *_bounds(choice("O0", "O1", "O2"), "fp16_opt_level"),
    *_bounds(choice("linear", "cosine", "constant", "constant_with_warmup", "polynomial"), "lr_scheduler_type"),
    *_bounds(choice("adamw", "adafactor", "adamw_mini", "adamw_custom", "adamw_16bit_moment"), "optim"),
    *_bounds(_SHARDING, "sharding"),
)
BOUNDS = {option.name: option.kind for option in PADDLENLP}

# What PaddleNLP's files of arguments may say and these scripts do not have: the value that asks for nothing, and what
# there is instead.
UNSUPPORTED = {
    "eval_with_do_generation": (False, "paddle-te evaluate --prompts generates"),
    "save_generation_output": (False, "paddle-te evaluate --prompts generates"),
    "pissa": (False, "--lora is the one there is"),
    "use_quick_lora": (False, "--lora is the one there is"),
    "vera": (False, "--lora is the one there is"),
    "lokr": (False, "--lora is the one there is"),
    "reft": (False, "--lora is the one there is"),
    "prefix_tuning": (False, "--lora is the one there is"),
    "neftune": (False, "training adds no noise"),
    "autotuner_benchmark": (False, "tools/benchmark/throughput.py measures"),
    "benchmark": (False, "tools/benchmark/throughput.py measures"),
    "flash_mask": (False, "zero_padding needs no mask with backends pd and te"),
    "use_long_sequence_strategies": (False, "sequences are as long as the model's positions"),
}


def without_unsupported(values):
    """Return {flag: value} without those of UNSUPPORTED and REMOVED, which ask for nothing or raise ValueError."""
    values = without_removed(values)
    for name, (nothing, remedy) in UNSUPPORTED.items():
        if name in values and not asks_for_nothing(values[name], nothing):
            raise ValueError(f"{name} {str(values[name]).lower()}: is not supported; {remedy}")
    return {name: value for name, value in values.items() if name not in UNSUPPORTED}
