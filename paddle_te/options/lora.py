"""LoRA's flags, and the adapter that they ask for as one record."""

from __future__ import annotations

from paddle_te.options.option import (
    BELOW_ONE,
    FLAG,
    GIVEN,
    HOSTED,
    PATH,
    POSITIVE,
    SAME,
    SEARCHED,
    SILENT,
    choice,
    option,
    section,
    whole,
)
from paddle_te.records import Record, record

TARGETS = ("all", "attention", "mlp")
WITH_LORA = {"lora": True}
# What a run needs for a base in fp8, and what PaddleNLP's word rslora_plus stands for
FP8_BASE: dict[str, object] = {"use_fp8": True, "quantize_base": "fp8"}
RSLORA_PLUS: dict[str, object] = {"rslora": True, "lora_alpha": 4, "lora_plus_scale": 4.0}
# What memory and time of an adapter depend on: the field of Adapter, and its flag
COUNTED = {"rank": "lora_rank", "targets": "lora_targets", "fp8_base": "quantize_base"}
TRANSPOSES_KEPT = "keep_fp8_transpose_cache"


@record
class Adapter(Record):
    """A LoRA adapter as a run is asked for it.

    rank: of A and B. targets: one of TARGETS, the projections that have A and B. fp8_base: whether the frozen weights
    of the decoder layers exist in fp8 only. alpha: B · A is multiplied by alpha / rank, with rslora alpha / sqrt(rank);
    None: PaddleNLP's choice, see `numerator`. dropout: of A's inputs. plus_scale: B's learning rate over A's.
    """

    rank: int = 32
    targets: str = TARGETS[0]
    fp8_base: bool = False
    alpha: int | None = None
    rslora: bool = False
    dropout: float = 0.0
    plus_scale: float = 1.0

    @property
    def numerator(self) -> int:
        """What alpha is, by default as in PaddleNLP's run_finetune.py."""
        return self.alpha or (4 if self.rslora else 2 * self.rank)

    @property
    def counted(self) -> dict[str, object]:
        """{field: value} that memory and time depend on."""
        return {name: getattr(self, name) for name in COUNTED}

    @property
    def flags(self) -> dict[str, object]:
        """{flag: value} that ask for an adapter of this rank on these parts, over this base."""
        base = {"quantize_base": FP8_BASE["quantize_base"] if self.fp8_base else None}
        return WITH_LORA | {flag: getattr(self, name) for name, flag in COUNTED.items()} | base


@section
class LoRA:
    """Whether a LoRA adapter is trained instead of the model, and which."""

    lora: bool = option(
        FLAG,
        default=False,
        help="Train a LoRA adapter and leave the model as it is.",
        doc="train an adapter only",
        zh="只训练 adapter",
        planned=GIVEN,
        line=SAME,
    )
    lora_rank: int = option(
        whole(1, limit=2**16),
        default=Adapter.rank,
        doc="rank of the adapter",
        zh="adapter 的秩",
        planned=GIVEN,
        line=SAME,
    )
    lora_alpha: int | None = option(
        whole(1, limit=10**6),
        default=Adapter.alpha,
        help="The adapter's outputs are scaled by lora_alpha / lora_rank. Default: twice lora_rank; with rslora 4.",
        doc="its outputs are scaled by alpha / rank",
        zh="adapter 的输出乘以 alpha / rank",
        shown="2 · rank; 4 with `--rslora`",
        shown_zh="2 · rank；`--rslora` 时为 4",
        line=SILENT,
    )
    rslora: bool = option(
        FLAG,
        default=Adapter.rslora,
        help="Scale by lora_alpha / sqrt(lora_rank) instead, as rank-stabilized LoRA does.",
        doc="scale by alpha / √rank instead (rank-stabilized LoRA)",
        zh="改为乘以 alpha / √rank（rank-stabilized LoRA）",
        needs=WITH_LORA,
        line=SAME,
    )
    lora_plus_scale: float = option(
        POSITIVE,
        default=Adapter.plus_scale,
        doc="learning rate of B over that of A (LoRA+); `rslora_plus` in PaddleNLP's files is `--rslora true "
        "--lora_alpha 4 --lora_plus_scale 4`",
        zh="B 与 A 的学习率之比（LoRA+）；PaddleNLP 参数文件中的 `rslora_plus` 即 `--rslora true --lora_alpha 4 "
        "--lora_plus_scale 4`",
        needs=WITH_LORA,
        line=SAME,
    )
    lora_dropout: float = option(
        BELOW_ONE,
        default=Adapter.dropout,
        help="Dropout on the adapter's inputs.",
        doc="on the adapter's inputs",
        zh="作用于 adapter 的输入",
    )
    lora_targets: str = option(
        choice(*TARGETS),
        default=Adapter.targets,
        help="Projections with an adapter: all, attention or mlp.",
        doc="`all`, `attention` (q, k, v, o) or `mlp` (gate, up, down)",
        zh="`all`、`attention`（q、k、v、o）或 `mlp`（gate、up、down）",
        planned=GIVEN,
        line=HOSTED,
    )
    quantize_base: str | None = option(
        choice("fp8"),
        default=None,
        help="fp8: LoRA's frozen weights of the decoder layers exist in fp8 only, in half of bfloat16's memory. Each "
        "is quantized as it is read, with one scale, or with --fp8_recipe block one for each block; --merge_lora reads "
        "them again. Needs --use_fp8 true.",
        doc="`fp8`: LoRA's frozen weights of the decoder layers exist in fp8 only; needs `--use_fp8`",
        zh="`fp8`：LoRA 冻结的 decoder 层权重只以 fp8 保存；需要 `--use_fp8`",
        needs=WITH_LORA,
        planned=GIVEN,
    )
    keep_fp8_transpose_cache: bool = option(
        FLAG,
        default=False,
        help="Keep the transposed copies of --quantize_base's weights, which backward reads, in one more byte a "
        "weight. Each is made when its weight is quantized, and no step makes any. Backend paddle needs none.",
        doc="keep the transposed copies of `--quantize_base`'s weights, in one more byte a weight, instead of making "
        "them in each backward; `paddle` needs none",
        zh="保留 `--quantize_base` 的权重的转置副本（每个权重多一个字节），不在每次反向计算中重新生成；`paddle` 不需要",
        needs={"quantize_base": "fp8"},
        planned=SEARCHED,
    )
    lora_path: str | None = option(
        PATH,
        default=None,
        help="Folder of an adapter to start from, ours, PaddleNLP's or PEFT's; its rank, scaling and targets hold.",
        doc="adapter to start from, of any backend or PEFT's; its rank, scaling and targets hold",
        zh="从已有的 adapter（任意后端或 PEFT 的）开始；沿用其秩、缩放和目标",
        needs=WITH_LORA,
        line=SAME,
    )
    merge_lora: bool = option(
        FLAG,
        default=False,
        doc="also save the model with the adapter added, in `merged/`",
        zh="另存合并 adapter 后的模型到 `merged/`",
        needs=WITH_LORA,
    )

    @property
    def adapter(self) -> Adapter:
        """The adapter that is trained where `lora` is true."""
        return Adapter(
            rank=self.lora_rank,
            targets=self.lora_targets,
            fp8_base=self.fp8_base,
            alpha=self.lora_alpha,
            rslora=self.rslora,
            dropout=self.lora_dropout,
            plus_scale=self.lora_plus_scale,
        )

    @property
    def fp8_base(self) -> bool:
        """Whether the frozen weights exist in fp8 only."""
        return self.quantize_base is not None

    @property
    def makes_transposes(self) -> bool:
        """Whether backward makes transposed copies of weights that exist in fp8 only, as no such copies are kept."""
        return self.fp8_base and not self.keep_fp8_transpose_cache

    def adapts(self, part: str) -> bool:
        """Return whether the GEMMs of "attention" or the "mlp" have an adapter's low-rank products beside them."""
        return self.lora and self.lora_targets in (TARGETS[0], part)
