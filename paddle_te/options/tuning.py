"""The flags of fine-tuning and of tuning on preferences: models, data and losses."""

from __future__ import annotations

from paddle_te.options.lora import LoRA
from paddle_te.options.option import (
    FLAG,
    HOSTED,
    NOT_NEGATIVE,
    PATH,
    PATH_OR_EMPTY,
    POSITIVE,
    REQUIRED,
    SILENT,
    TOKENS,
    choice,
    number,
    option,
    options_of,
    section,
)
from paddle_te.options.training import DEGREE

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
        DEGREE,
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
DPO, KTO, PREFERENCE_DATA = map(options_of, (PairPreference, SinglePreference, PreferenceData))
