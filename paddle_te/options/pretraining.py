"""The flags of pretraining: its model, its data and its schedule."""

from __future__ import annotations

from paddle_te.options.option import (
    FLAG,
    HOSTED,
    NOT_NEGATIVE,
    PATH,
    PATH_OR_EMPTY,
    SAME,
    SILENT,
    STEPS,
    TEXT,
    TOKENS,
    Kind,
    option,
    options_of,
    section,
)


def proportions(split: str) -> list[float]:
    """Return three numbers from "949,50,1" or "949/50/1". Raise ValueError where one is none."""
    return [float(part) for part in split.replace("/", ",").split(",")]


def _is_split(split: str) -> bool:
    try:
        parts = proportions(split)
    except ValueError:
        return False
    return len(parts) == 3 and min(parts) >= 0 and 0 < sum(parts) < float("inf")


SPLIT = Kind(str, "three numbers, train,valid,test, such as 949,50,1", _is_split)


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


PRETRAINING, PRETRAIN_MODEL, PRETRAIN_DATA = map(options_of, (Schedule, PretrainModel, PretrainData))
