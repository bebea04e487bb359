"""The launcher's arguments, in the order of its scripts' positions, and its variables.

Defaults are as the user would write them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from paddle_te.host import HOSTS
from paddle_te.options.layers import BACKENDS, Layers
from paddle_te.options.lora import COUNTED, TARGETS, WITH_LORA, Adapter
from paddle_te.options.option import (
    FLAG,
    PATH,
    PATH_OR_EMPTY,
    RANKS,
    SECONDS,
    STEP_TOKENS,
    STEPS,
    STEPS_OR_NONE,
    TEXT,
    Kind,
    Limits,
    Option,
    choice,
    options_of,
    whole,
)
from paddle_te.options.pretraining import PretrainData, PretrainModel
from paddle_te.options.training import Memory, Optimizer, Parallelism, Run
from paddle_te.options.tuning import FinetuneData, FinetuneModel


def _yes_or_no(*words: str) -> Kind:
    """Return the kind of words for yes and no in turn."""
    return Kind(bool, f"one of {', '.join(words)}", read=lambda text: words.index(text) % 2 == 0)


BOOLEAN = _yes_or_no("true", "false")
SWITCH = _yes_or_no("1", "0", "true", "false")


AUTO, ALL = "auto", "all"
STEP = Kind(
    str,
    "none, auto or the number of a saved step",
    read=lambda text: text if text in ("none", AUTO) else STEPS_OR_NONE.parse(text),
)


def _unless(word: str, limits: Limits) -> Limits:
    """Return a Kind's limits, which that word is not beyond."""
    return tuple((lambda value, fits=fits: value == word or fits(value), words) for fits, words in limits)


def _or_auto(option: Option) -> Option:
    """Return the option with one more value: auto, which leaves it to the planner."""
    kind = option.kind
    allowed = replace(
        kind,
        words=f"{kind.words}, or {AUTO}",
        accepts=lambda value: value == AUTO or kind.accepts(value),
        limits=_unless(AUTO, kind.limits),
        read=lambda text: text if text == AUTO else kind.read(text),
        values=kind.values and (*kind.values, AUTO),
    )
    return option.but(kind=allowed)


DEGREE_OR_ALL = Kind(
    str,
    "a whole number of at least 1, or all",
    lambda value: value == ALL or RANKS.accepts(value),
    read=lambda text: text if text == ALL else RANKS.read(text),
    limits=_unless(ALL, RANKS.limits),
)


def _read_devices(text: str) -> list[str]:
    names = text.split(",")
    if not all(re.fullmatch(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+", name) for name in names):
        raise ValueError(text)
    ids = [str(int(name)) if name.isdigit() else name for name in names]
    if len({*ids}) != len(ids):
        raise ValueError(text)
    return ids


DEVICE_LIST = Kind(
    list, "different device numbers with commas between, as 0,1,2,3, or GPUs' UUIDs, as GPU-8f2e", read=_read_devices
)

_SCRIPTS = {
    option.name: option
    for option in options_of(
        Layers, Parallelism, Memory, Optimizer, Run, PretrainModel, PretrainData, FinetuneModel, FinetuneData
    )
}


def _as(name: str, flag: str, **changes: Any) -> Option:
    """Return the script's option under the launcher's name for it. changes: what the launcher has otherwise."""
    own = {"name": name, "flag": flag, "config": False, "needs": {}, "source": ""}
    own |= {"shown": "", "shown_zh": ""} if "default" in changes else {}
    return _SCRIPTS[flag].but(**own | changes)


def _variable(flag: str, **changes: Any) -> Option:
    """Return the script's option as a variable, whose name is the flag's in capitals; what is on or off is 1 or 0."""
    on_or_off = {"kind": SWITCH, "default": "0"} if _SCRIPTS[flag].kind is FLAG else {}
    return _as(flag.upper(), flag, **on_or_off | changes)


# Of a fine-tuning run: each method's flags
METHODS: dict[str, dict[str, object]] = {"full": {}} | {
    "lora" if targets == Adapter.targets else f"lora-{targets}": WITH_LORA | {COUNTED["targets"]: targets}
    for targets in TARGETS
}

# What several jobs have. `_shared` gives each its own defaults.
_SHARED = (
    _as(
        "batch_size_per_device",
        "per_device_train_batch_size",
        help="sequences a device takes at a time (micro-batch)",
        doc="sequences of a micro-batch",
        zh="一个 micro-batch 的序列数",
        passed=True,
    ),
    _as(
        "FSDP",
        "sharding_parallel_degree",
        kind=DEGREE_OR_ALL,
        help="devices that share optimizer state, gradients, weights (see sharding_stage), or all",
        doc="`--sharding_parallel_degree`; `all`: over all devices that TP and PP leave",
        zh="即 `--sharding_parallel_degree`；`all`：TP 和 PP 之外的所有设备",
        passed=True,
    ),
    _as(
        "TP",
        "tensor_parallel_degree",
        kind=RANKS,
        doc="tensor parallel degree; 1 on a single device",
        zh="张量并行度；单卡时填 1",
        passed=True,
    ),
    _as("PP", "pipeline_parallel_degree", kind=RANKS, help="pipeline parallel degree", zh="流水线并行度", passed=True),
    _as(
        "VP",
        "virtual_pp_degree",
        doc="virtual pipeline stages of a device (Megatron's interleaved schedule)",
        zh="每个设备的虚拟流水线段数（Megatron 的交错调度）",
        passed=True,
    ),
    _as(
        "GA",
        "gradient_accumulation_steps",
        help="gradient accumulation: micro-batches of a step",
        doc="micro-batches of a step",
        zh="每步的 micro-batch 数（梯度累积）",
        passed=True,
    ),
    _as(
        "SP",
        "sequence_parallel",
        kind=BOOLEAN,
        help="sequence parallel: true, false",
        doc="`true`: sequence parallel",
        zh="`true`：序列并行",
        passed=True,
    ),
    _as("max_seqlen", "max_seq_length", help="tokens of a sequence", zh="序列的 token 数", passed=True),
    _as(
        "sharding_stage",
        "sharding",
        kind=choice("stage1", "stage2", "stage3"),
        help="what FSDP shards; ignored with FSDP 1",
        doc="`stage1`, `stage2`, `stage3`; without effect when FSDP is 1",
        zh="`stage1`、`stage2`、`stage3`；FSDP 为 1 时不起作用",
        passed=True,
    ),
    _as(
        "backend",
        "transformer_engine_backend",
        kind=choice(*BACKENDS),
        help="decoder layers: none (PaddleNLP's), te (Transformer Engine's), pd (te's in plain Paddle)",
        doc="`none`, `te`, `pd`",
        zh="`none`、`te`、`pd`",
        passed=True,
    ),
    Option(
        "precision",
        choice("bf16", "fp8", "fp32"),
        doc="`bf16`, `fp8` (te; pd emulates it), `fp32` (none, pd)",
        zh="`bf16`、`fp8`（te；pd 为模拟）、`fp32`（none、pd）",
    ),
    Option(
        "recompute",
        choice("none", "core_attn", "full"),
        doc="what backward computes again: `none`, `core_attn`, `full`",
        zh="反向时重新计算的部分：`none`、`core_attn`、`full`",
    ),
    Option(
        "resume_step",
        STEP,
        doc="`none`, `auto` (latest complete checkpoint) or the number of a saved step",
        zh="`none`、`auto`（最近的完整 checkpoint）或已保存的步数",
    ),
    Option(
        "nsys_profile",
        BOOLEAN,
        help="wrap the run in nsys: true, false",
        doc="`true`: in Nsight Systems",
        zh="`true`：在 Nsight Systems 中运行",
    ),
)


def _shared(**defaults: object) -> list[Option]:
    options = {option.name: option for option in _SHARED}
    return [options[name].but(default=default) for name, default in defaults.items()]


PRETRAIN = (
    _as(
        "model_name",
        "model_name_or_path",
        default="meta-llama/Llama-2-7b",
        help="known name, or folder with config.json",
        doc="`meta-llama/Llama-2-7b`, `-13b`, `-70b`, `meta-llama/Meta-Llama-3-8B`, `-70B`, "
        "`meta-llama/Meta-Llama-3.1-8B`, `-70B`, `meta-llama/Llama-3.2-1B`, `-3B` "
        "([3.1, 3.2](models.md#llama-31-and-32)), `Qwen/Qwen2.5-0.5B`, `-1.5B`, `-3B`, `-7B`, `-14B`, `-32B`, "
        "`-72B`, `Qwen/Qwen3-0.6B`, `-1.7B`, `-4B`, `-8B`, `-14B`, each with `-Base`, too, `-32B`, "
        "`deepseek-ai/DeepSeek-R1-0528-Qwen3-8B` ([Qwen3](models.md#qwen3-phi-4-olmo-2-glm-4)), "
        "`google/gemma-3-1b-pt`, `-4b-pt`, `-12b-pt`, `-27b-pt`, each with `-it`, too, `microsoft/Phi-4-mini-instruct` "
        "([Gemma 3, Phi-4-mini](models.md#gemma-3-gemma-2-and-phi-4-mini)), "
        "`deepseek-ai/DeepSeek-R1-Distill-Llama-8B`, `-70B`, `-Qwen-1.5B`, `-7B`, `-14B`, `-32B`, "
        "`mistralai/Mistral-7B-v0.1`, `-v0.3` ([Qwen2.5, Mistral](models.md#qwen25-and-mistral)), "
        "`gpt-126m`, `-1.3b`, `-5b`, `-6.7b`, `-13b`, `-175b` ([GPT](models.md#gpt)), "
        "`glam-126m-64e`, `-64b-64e` ([GLaM](../guides/moe.md#glam)), `ibm-granite/granite-3.0-1b-a400m-base`, "
        "`-3b-a800m-base`, `-2b-base`, `-8b-base` ([Granite](../guides/moe.md#granite)), "
        "`llama-125m`, `tiny-llama-demo`, built in (nothing is downloaded; `llama-2-7b` does as well); or a folder "
        "with `config.json`, PaddleNLP's or Hugging Face's. Only the configuration is read: weights come from "
        "`init_weight`",
        zh="内置（不下载）：`meta-llama/Llama-2-7b`、`-13b`、`-70b`，`meta-llama/Meta-Llama-3-8B`、`-70B`，"
        "`meta-llama/Meta-Llama-3.1-8B`、`-70B`，`meta-llama/Llama-3.2-1B`、`-3B`"
        "（[3.1、3.2](../reference/models.md#llama-31-and-32)），`Qwen/Qwen2.5-0.5B`、`-1.5B`、`-3B`、`-7B`、"
        "`-14B`、`-32B`、"
        "`-72B`，`Qwen/Qwen3-0.6B`、`-1.7B`、`-4B`、`-8B`、`-14B`（各有 `-Base`）、`-32B`，"
        "`deepseek-ai/DeepSeek-R1-0528-Qwen3-8B`（[Qwen3](../reference/models.md#qwen3-phi-4-olmo-2-glm-4)），"
        "`google/gemma-3-1b-pt`、`-4b-pt`、`-12b-pt`、`-27b-pt`（各有 `-it`）、`microsoft/Phi-4-mini-instruct`"
        "（[Gemma 3、Phi-4-mini](../reference/models.md#gemma-3-gemma-2-and-phi-4-mini)），"
        "`deepseek-ai/DeepSeek-R1-Distill-Llama-8B`、`-70B`、`-Qwen-1.5B`、`-7B`、`-14B`、`-32B`，"
        "`mistralai/Mistral-7B-v0.1`、`-v0.3`（[Qwen2.5、"
        "Mistral](../reference/models.md#qwen25-and-mistral)），"
        "`gpt-126m`、`-1.3b`、`-5b`、`-6.7b`、`-13b`、`-175b`（[GPT](../reference/models.md#gpt)），"
        "`glam-126m-64e`、`-64b-64e`（[GLaM](../guides/moe.md#glam)），"
        "`ibm-granite/granite-3.0-1b-a400m-base`、"
        "`-3b-a800m-base`、`-2b-base`、`-8b-base`（[Granite](../guides/moe.md#granite)），"
        "`llama-125m`，`tiny-llama-demo`（也可写 `llama-2-7b`）；"
        "或含 `config.json`（PaddleNLP 或 Hugging Face 的）的文件夹。只读取配置，权重由 `init_weight` 给出",
    ),
    _as(
        "tokenizer_name",
        "tokenizer_name_or_path",
        default="",
        help="known name, folder, or none with MOCK_DATA=1 (default: the model's own)",
        doc="a folder, or a name that PaddleNLP downloads; `none` with `MOCK_DATA=1`",
        zh="文件夹，或由 PaddleNLP 下载的名称；`MOCK_DATA=1` 时可为 `none`",
        shown="the model's own",
        shown_zh="模型自带的",
    ),
    *map(_or_auto, _shared(batch_size_per_device=2, FSDP=1, TP=2, PP=1, VP=1, GA=8, SP="false")),
    *_shared(max_seqlen=4096),
    *map(_or_auto, _shared(sharding_stage="stage2")),
    *_shared(backend="none", precision="bf16"),
    *map(_or_auto, _shared(recompute="none")),
    *_shared(resume_step="none"),
    _as(
        "init_weight",
        "te_init_weight_path",
        kind=PATH_OR_EMPTY,
        default="none",
        help="folder with the weights to start from, or none",
        doc="folder with weights in the backend's layout ([converted](../guides/convert.md)) or Hugging Face's",
        zh="权重文件夹：该后端的布局（由[转换工具](../guides/convert.md)得到），或 Hugging Face 的文件夹",
    ),
    *_shared(nsys_profile="false"),
)

FINETUNE = (
    _as(
        "model_name",
        "model_name_or_path",
        default="",
        doc="folder; the weights in the backend's layout or Hugging Face's",
        zh="文件夹；权重须为该后端或 Hugging Face 的布局",
        shown="–",
    ),
    _as(
        "tokenizer_name",
        "tokenizer_name_or_path",
        default="",
        help="folder with the tokenizer (default: model_name)",
        doc="folder with the tokenizer",
        zh="tokenizer 所在文件夹",
        shown="the model",
        shown_zh="同 model_name",
    ),
    _as(
        "dataset",
        "dataset_name_or_path",
        kind=PATH_OR_EMPTY,
        default="",
        help="folder of train.json and, if there is one, dev.json: conversations, or questions and answers",
        doc="folder of `train.json` and, if there is one, `dev.json`, or of [other files](../guides/fine-tune.md#data)",
        zh="含 `train.json`（可另有 `dev.json`）或[其他格式的文件](../guides/fine-tune.md#data)的文件夹",
        shown="–",
    ),
    _as(
        "output",
        "output_dir",
        kind=PATH_OR_EMPTY,
        default="",
        doc="the fine-tuned model or adapter, and checkpoints",
        zh="微调后的模型或 adapter，以及 checkpoint",
        shown="–",
    ),
    Option(
        "method",
        choice(*METHODS),
        "lora",
        doc="`full`, `lora`, `lora-attention`, `lora-mlp`",
        zh="`full`、`lora`、`lora-attention`、`lora-mlp`",
    ),
    *map(_or_auto, _shared(batch_size_per_device=4, FSDP=1, TP=1, GA=1, SP="false")),
    *(
        option.but(
            doc="a multiple of 16; half of it at most for `src`", zh="16 的倍数；`src` 至多占一半", flag="max_length"
        )
        for option in _shared(max_seqlen=2048)
    ),
    *map(_or_auto, _shared(sharding_stage="stage2")),
    *_shared(backend="te", precision="bf16"),
    *map(_or_auto, _shared(recompute="none")),
    *_shared(resume_step="none", nsys_profile="false"),
)

# Those of fine-tuning, of rows of preferences; and a pipeline's, which fine-tuning does not have
PREFERENCE = (
    *(
        option.but(
            doc="tokens of a packed row, a multiple of 16; half of it at most for a question",
            zh="打包序列的 token 数，16 的倍数；问题至多占一半",
            flag="max_seq_len",
        )
        if option.name == "max_seqlen"
        else option.but(
            doc="folder of `train.json` and, if there is one, `dev.json`, of "
            "[preferences](../guides/preferences.md#data)",
            zh="含 `train.json`（可另有 `dev.json`）的文件夹：[偏好数据](../guides/preferences.md#data)",
        )
        if option.name == "dataset"
        else option.but(default=1)
        if option.name == "batch_size_per_device"
        else option
        for option in FINETUNE
    ),
    *_shared(PP=1, VP=1),
)

# Variables that all jobs have. One that is empty counts as not set.
VARIABLES = (
    Option(
        "HOST",
        choice(*HOSTS),
        None,
        "library that the model and its Trainer come from; found if not given",
        doc="`paddlenlp` or [`paddleformers`](../guides/paddleformers.md): where the model and its Trainer come from",
        zh="`paddlenlp` 或 [`paddleformers`](../guides/paddleformers.md)：模型及其 Trainer 的来源",
        shown="the one that is installed",
        shown_zh="已安装的那个",
    ),
    _variable(
        "device",
        kind=choice("gpu", "nvgpu", "cpu"),
        default=None,
        help="kind of device; found if not given",
        doc="`gpu`, `nvgpu` or `cpu`",
        zh="`gpu`、`nvgpu` 或 `cpu`",
        shown="found",
        shown_zh="自动检测",
    ),
    Option(
        "DEVICES",
        DEVICE_LIST,
        None,
        "devices to use, as 0,1,2,3, or the UUIDs of GPUs; found if not given",
        doc="`0,1,2,3`, or UUIDs as `nvidia-smi -L` shows them, also cut short: `GPU-8f2e,GPU-17c0`",
        zh="`0,1,2,3`，或 `nvidia-smi -L` 所示的 UUID（可截短）：`GPU-8f2e,GPU-17c0`",
        shown="all (nvgpu's host runtime: one)",
        shown_zh="全部（nvgpu 的 host runtime：一个）",
    ),
    Option(
        "EXTRA_ARGS",
        TEXT,
        "",
        doc="appended to the training script's arguments, quoted as in a shell; the last of two counts",
        zh="追加给训练脚本的参数，引号规则同 shell；重复时以后者为准",
    ),
    Option(
        "OVERWRITE",
        SWITCH,
        "0",
        doc="1: start anew in a folder that holds checkpoints or a finished model, which move to `output/earlier-N`",
        zh="1：在已有 checkpoint 或训练完成的模型的文件夹中重新开始，原有文件移至 `output/earlier-N`",
    ),
    Option(
        "DETERMINISTIC",
        SWITCH,
        "0",
        "1: equal runs give equal bits on GPUs, for more memory and a little time",
        doc="1: [two equal runs give equal bits](../guides/pretrain.md#equal-bits) on GPUs, which costs memory",
        zh="1：在 GPU 上，两次相同的运行[逐位一致](../guides/pretrain.md#equal-bits)，代价是显存",
    ),
    _as(
        "SEP",
        "sep_parallel_degree",
        kind=RANKS,
        default=1,
        doc="devices that [share each sequence](../background/long-sequences.md), by an exchange of attention's heads "
        "(DeepSpeed-Ulysses)",
        zh="[共享一个序列](../background/long-sequences.md)的设备数，attention 前后交换 head（DeepSpeed-Ulysses）",
        passed=True,
    ),
    _as(
        "CP",
        "context_parallel_degree",
        kind=RANKS,
        default=1,
        doc="devices that [share each sequence](../background/long-sequences.md), among which keys and values travel "
        "(ring attention); not with SEP",
        zh="[共享一个序列](../background/long-sequences.md)的设备数，key 和 value 在其间传递（ring "
        "attention）；"
        "不能与 SEP 同用",
        passed=True,
    ),
    _as(
        "EP",
        "expert_parallel_degree",
        kind=RANKS,
        default=1,
        help="sharding devices that divide a mixture's experts; tensor parallel ones do so by themselves",
        doc="devices that [divide a mixture's experts](../background/parallelism.md#experts), in a row of those that "
        "share states (FSDP); those of TP do so by themselves",
        zh="[分摊专家](../background/parallelism.md#experts)的设备数，取自共享状态的设备（FSDP）；TP "
        "的设备自动分摊专家",
        passed=True,
    ),
    Option(
        "TOKENS_PER_STEP",
        STEP_TOKENS,
        None,
        doc="with [`auto`](../guides/plan.md#in-the-launcher): tokens of a step, of all devices together",
        zh="与 [`auto`](../guides/plan.md#in-the-launcher) 同用：每步所有设备的 token 总数",
        shown="16 sequences a device",
        shown_zh="每个设备 16 个序列",
    ),
    Option(
        "GPU",
        choice("h100", "h200"),
        None,
        "of a dry run for another machine: its GPUs, for auto and the check of memory; found if not given",
        doc="`h100` or `h200`: the GPUs that a `DRY_RUN` is for, for `auto` and [the check of "
        "memory](../guides/plan.md#before-a-job-starts)",
        zh="`h100` 或 `h200`：`DRY_RUN` 所针对的 GPU，用于 `auto` 和[显存检查](../guides/plan.md#before-a-job-starts)",
        shown="those that are here",
        shown_zh="本机的 GPU",
    ),
    Option(
        "CHECK_MEMORY",
        SWITCH,
        "1",
        doc="0: start also where [the planner's memory](../guides/plan.md#before-a-job-starts) is more than the "
        "GPUs have",
        zh="0：即使[规划器估算的显存](../guides/plan.md#before-a-job-starts)超过 GPU 也启动",
    ),
    Option("DRY_RUN", SWITCH, "0", "1: print the command and stop", zh="1：打印命令后停止"),
    Option(
        "NNODES",
        RANKS,
        1,
        "nodes (default SLURM_STEP_NUM_NODES or SLURM_JOB_NUM_NODES, else 1)",
        doc="[nodes](../guides/cluster.md)",
        zh="[节点](../guides/cluster.md)数",
        shown="Slurm's, else 1",
        shown_zh="取自 Slurm，否则 1",
    ),
    Option(
        "NODE_RANK",
        whole(0, limit=2**16),
        None,
        "this node's rank, from 0 (default SLURM_NODEID)",
        doc="this node's rank, from 0",
        zh="本节点的编号，从 0 开始",
        shown="Slurm's",
        shown_zh="取自 Slurm",
    ),
    Option(
        "MASTER",
        TEXT,
        None,
        "address:port of the node of rank 0 (default: the first of IP_STR)",
        doc="address:port of the node of rank 0",
        zh="rank 0 所在节点的地址:端口",
        shown="the first of IP_STR",
        shown_zh="IP_STR 的第一个",
    ),
    Option(
        "MASTER_PORT",
        whole(1, limit=65535),
        None,
        "where MASTER has no port (default 6070; under Slurm by the job's number)",
        doc="where MASTER has no port",
        zh="MASTER 未给端口时使用",
        shown="6070; under Slurm by the job's number",
        shown_zh="6070；Slurm 下由作业号决定",
    ),
    Option(
        "IP_STR",
        TEXT,
        None,
        "the nodes' addresses in the order of their ranks, with commas between",
        zh="各节点的地址，按编号排列，用逗号分隔",
    ),
    Option(
        "MAX_RESTARTS",
        whole(0, limit=10**6),
        0,
        doc="how often a job that died or hung starts anew by itself, from its newest checkpoint; not after a refusal, "
        "nor where it fails alike at the same step again",
        zh="进程退出或卡死后，作业从最新 checkpoint 自动重新开始的次数；参数被拒绝，或在同一步再次同样失败时不再开始",
    ),
    Option(
        "ELASTIC",
        SWITCH,
        "0",
        doc="1: where devices are gone at such a start, it goes on with fewer data-parallel ranks and more "
        "accumulation, the batch being the same (one node)",
        zh="1：重新开始时若有设备消失，则减少数据并行的进程数、增加梯度累积步数，批大小不变（仅单机）",
    ),
    Option(
        "STEP_TIMEOUT",
        SECONDS,
        300,
        doc="seconds without a sign of a rank in a step, at least 10 median steps, after which the job hangs: all "
        "stacks are printed, and it ends with status 124 or starts anew; 0: never",
        zh="训练步内某进程无进展的秒数（至少为步时间中位数的 10 倍），超过即视为卡死：打印各进程的堆栈，作业以状态 124 "
        "结束或重新开始；0：不限",
    ),
    Option(
        "START_TIMEOUT",
        SECONDS,
        1800,
        doc="likewise for the start with its first step, for saving and evaluating, and for the nodes to find each "
        "other, which say every 10 s for whom they wait; 0: never, but 900 for the nodes",
        zh="同上，用于启动和第一步、保存、评估，以及各节点互相连接（每 10 秒报告在等待谁）；0：不限，节点连接为 900 秒",
    ),
    Option(
        "TERM_GRACE",
        SECONDS,
        30,
        "seconds from SIGTERM to the job's end, in which it saves a checkpoint",
        zh="从 SIGTERM 到作业结束的秒数，其间保存 checkpoint",
    ),
    Option(
        "PROFILER",
        choice("none", "paddle"),
        "none",
        doc="`paddle`: Paddle's profiler, where there is no nsys",
        zh="`paddle`：没有 nsys 时用 Paddle 的 profiler",
    ),
    Option(
        "PROFILE_START_STEP",
        STEPS,
        3,
        "first step a profiler records",
        doc="first profiled step; steps count from 0",
        zh="采集的第一步，步数从 0 计数",
    ),
    Option(
        "PROFILE_STOP_STEP",
        STEPS,
        3,
        "last step a profiler records",
        doc="last profiled step",
        zh="采集的最后一步",
    ),
)
SPLIT = "split_param"  # of --sharding_parallel_config: each rank updates a part of every weight
# Of --sharding_parallel_config, by stage. Gradients are reduced during backward; the next forward gathers weights
# (stage1) or waits for their broadcasts.
OVERLAPS = {
    "stage1": f"{SPLIT} enable_stage1_overlap enable_stage1_allgather_overlap",
    "stage2": "enable_stage2_overlap",
}
# Slurm's variables, where ours are not set. An srun may be on some of a job's nodes only.
FALLBACKS = {"NNODES": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), "NODE_RANK": ("SLURM_NODEID",)}

PRETRAIN_VARIABLES = (
    Option(
        "OUTPUT_BASE",
        PATH,
        "./outputs",
        doc="where the experiment's folder, `OUTPUT_BASE/EXP_NAME`, is made",
        zh="实验文件夹 `OUTPUT_BASE/EXP_NAME` 所在位置",
    ),
    _as(
        "OUTPUT_DIR",
        "output_dir",
        default=None,
        help="the run's folder itself, for checkpoints, logs and curves; without OUTPUT_BASE and EXP_NAME",
        doc="the run's folder itself, instead of `OUTPUT_BASE/EXP_NAME/output`",
        zh="直接指定实验的输出文件夹，代替 `OUTPUT_BASE/EXP_NAME/output`",
    ),
    Option(
        "EXP_NAME",
        PATH,
        None,
        "name of the experiment's folder; made from the arguments if not given",
        doc="name of the experiment's folder",
        zh="实验文件夹的名称",
        shown="from the arguments",
        shown_zh="由参数生成",
    ),
    _as(
        "DATA_PATH",
        "input_dir",
        kind=PATH,
        default=None,
        help="folder with .bin and .idx files (default /dataset)",
        doc="folder of `.bin`/`.idx` pairs",
        zh="`.bin`/`.idx` 所在文件夹",
        shown="`/dataset`",
    ),
    _variable(
        "mock_data",
        default="0",
        help="1: synthetic tokens instead of DATA_PATH",
        doc="1: random tokens instead",
        zh="1：改用随机 token",
    ),
    _variable("max_steps", kind=STEPS, default=20000, help="optimizer steps", zh="训练步数", passed=True),
    _variable(
        "save_steps", default=10000, help="steps between checkpoints", zh="保存 checkpoint 的间隔步数", passed=True
    ),
    _variable(
        "logging_steps",
        default=None,
        help="steps between log lines (default 1, with overlap 2)",
        doc="steps between log lines",
        zh="写日志的间隔步数",
        shown="1, with overlap 2",
        shown_zh="1，通信重叠时为 2",
        passed=True,
    ),
    _variable(
        "learning_rate",
        default=3e-05,
        doc="the greatest learning rate; the least is a tenth of it",
        zh="最大学习率；最小为其十分之一",
    ),
    _or_auto(
        Option(
            "OVERLAP",
            SWITCH,
            AUTO,
            "sharding's communication at the same time as computation, in stage1 and stage2; auto: where it can be",
            doc="1: sharding's communication [during computation](../guides/pretrain.md#overlap), in stage1 and "
            "stage2, with LOGGING_STEPS "
            "of 2 or more; `auto`: where that can be, and one line in the log says so, or why not",
            zh="1：sharding 的通信[与计算重叠](../guides/pretrain.md#overlap)，用于 stage1 和 stage2，"
            "LOGGING_STEPS 须为 2 或更大；`auto`：条件满足时开启，日志中有一行说明是否开启及原因",
        )
    ),
)
FINETUNE_VARIABLES = (
    _variable(
        "max_steps",
        kind=STEPS,
        default=None,
        help="optimizer steps (default: the epochs of run_finetune.py)",
        doc="optimizer steps",
        zh="训练步数",
        shown="the epochs of `run_finetune.py`",
        shown_zh="`run_finetune.py` 的 epoch 数",
        passed=True,
    ),
    _variable("chat_template"),
)

# The scripts' names of the launcher's arguments that they take as they are
FLAGS = {option.name: option.flag for option in (*_SHARED, *VARIABLES) if option.passed}
# The launcher's name of each flag that it has another name for, or a variable
NAMES = {
    option.flag: option.name
    for option in (*PREFERENCE, *FINETUNE, *FINETUNE_VARIABLES, *PRETRAIN, *PRETRAIN_VARIABLES, *VARIABLES)
    if option.flag
}
# The launcher's argument: PaddleNLP's flags that say it together
COMBINED = {
    "precision": ("bf16", "fp16", "use_fp8", "fp16_opt_level"),
    "recompute": ("recompute", "recompute_granularity"),
    "sharding_stage": ("sharding",),
}
