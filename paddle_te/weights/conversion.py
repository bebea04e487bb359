"""What a checkpoint is to become: what was asked for, and the layout, files and degrees that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paddle_te.configs.families import is_tied
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.weights import layouts, safetensors
from paddle_te.weights.config import (
    FUSE_FLAGS,
    fused_before,
)
from paddle_te.weights.folder import Checkpoint
from paddle_te.weights.layout import Layout
from paddle_te.weights.output_files import Target
from paddle_te.weights.tensors import CheckpointError
from paddle_te.weights.verification import FULL

# mode: (from, to); None: whatever the input's layout is, and the same again
# …2formers: Hugging Face's folder that also holds what PaddleFormers' Trainer resumes from
MODES = {
    "pd2te": ("pd", "te"),
    "te2pd": ("te", "pd"),
    "hf2te": ("hf", "te"),
    "hf2pd": ("hf", "pd"),
    "te2hf": ("te", "hf"),
    "pd2hf": ("pd", "hf"),
    "te2formers": ("te", "hf"),
    "pd2formers": ("pd", "hf"),
    "reshard": (None, None),
}
FORMERS = ("te2formers", "pd2formers")
FORMATS = ("pdparams", "safetensors")
MAX_SHARD_SIZE = 10 * 10**9


class Degrees(NamedTuple):
    """The output's degrees; None: the input's."""

    tp: int | None
    pp: int | None
    vp: int | None


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a checkpoint becomes.

    mode: from and to which layout: "pd2te", "te2pd", "hf2te", "hf2pd", "te2hf", "pd2hf", where pd is PaddleNLP's
        native layout, te Transformer Engine's and hf Hugging Face's; or "reshard": the layout stays; or "te2formers",
        "pd2formers": as to hf, with the optimizer's and the Trainer's state beside the weights as PaddleFormers'
        Trainer resumes from them (Llama).
    num_attention_heads, num_key_value_heads: needed only when the folder has no config.json.
    fuse_attention_qkv, fuse_attention_ffn: to pd: fuse the native weights so; None: as they were before pd2te (noted
        in config.json), else not fused.
    format: "pdparams" or "safetensors"; None: the input's (hf: always safetensors).
    tensor_parallel_degree, pipeline_parallel_degree: the output's; None: the input's (hf: 1).
    virtual_pp_degree: the output's; None: 1, or the input's where no degree is given.
    dtype: of the output, one of NUMBERS; numbers are rounded to the nearest even. None: the input's dtypes.
    max_shard_size: bytes; larger files are written in shards. None: MAX_SHARD_SIZE.
    lora_path: folder of a LoRA adapter (`open_adapter`), which is added to the weights; one sum of each is held at a
        time, in float32, and rounded once.
    workers: files written side by side; each holds a few copies of the tensor it is working on.
    with_optimizer: carry the optimizer's moments and master weights and the Trainer's state along, as a unified
        checkpoint (whole tensors in safetensors), from which the Trainer resumes in any degrees with
        --unified_checkpoint 1; degrees that are asked for are only checked. fp8 scales go along from te to te. A
        complete checkpoint is compared with its manifest, if it has one, and its output gets a manifest, too.
    verify_checkpoint: "full", "size" or "none": how much of the input's manifest, if it has one, is compared first.
    verify: first compare the input's files with its checksums.json.
    checksums: write a checksums.json (SHA-256 of each file) for the output.
    """

    mode: str
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    fuse_attention_qkv: bool | None = None
    fuse_attention_ffn: bool | None = None
    format: str | None = None
    tensor_parallel_degree: int | None = None
    pipeline_parallel_degree: int | None = None
    virtual_pp_degree: int | None = None
    dtype: str | None = None
    max_shard_size: int | None = None
    lora_path: str | Path | None = None
    workers: int = 1
    with_optimizer: bool = False
    verify: bool = False
    checksums: bool = False
    verify_checkpoint: str = FULL

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel_degree, self.pipeline_parallel_degree, self.virtual_pp_degree)

    def check_changes(self) -> None:
        """Raise CheckpointError where the output would be the input."""
        changes = *self.degrees, self.format, self.dtype, self.max_shard_size, self.lora_path
        if self.mode == "reshard" and not self.with_optimizer and all(change is None for change in changes):
            raise CheckpointError(
                "--mode reshard: nothing would change: give --tensor_parallel_degree, --pipeline_parallel_degree, "
                "--format, --dtype or --max_shard_size"
            )


def check_mode(checkpoint: Checkpoint, mode: str, merging: bool) -> None:
    """Raise CheckpointError for a mode that a Checkpoint's layout does not have."""
    kind = MODES[mode][0]
    if kind is None and not merging and checkpoint.layout.kind == "hf":
        raise CheckpointError(f"{checkpoint.folder}: Hugging Face's layout has no parallel files; use hf2te or hf2pd")
    if kind and checkpoint.layout.kind != kind:
        fitting = [m for m, (source, _) in MODES.items() if source == checkpoint.layout.kind]
        hint = f"--mode may be {' or '.join(fitting)}"
        raise CheckpointError(
            f"{checkpoint.folder}: is in {checkpoint.layout.title} layout, not one for {mode}; {hint}"
        )


def target_layout(checkpoint: Checkpoint, mode: str, *fuse: bool | None) -> Layout:
    """Return the output's Layout. fuse: values of FUSE_FLAGS. Raise CheckpointError for a family without it."""
    given = {flag: value for flag, value in zip(FUSE_FLAGS, fuse, strict=True) if value is not None}
    tied = is_tied(checkpoint.config)
    kind, family = MODES[mode][1] or checkpoint.layout.kind, checkpoint.layout.family
    if kind == "pd" and family.model_type not in PADDLENLP:
        ways = "; use hf2te or te2hf" if family.in_transformers else ""
        raise CheckpointError(f"--mode {mode}: PaddleNLP has no class for {family.title}, and so no layout{ways}")
    if kind == "hf" and not family.in_transformers:
        raise CheckpointError(f"--mode {mode}: transformers has no class for {family.title}, and so no layout")
    if kind == "pd" and not PADDLENLP[family.model_type].fused and any(given.values()):
        raise CheckpointError(f"--{next(iter(given))}: PaddleNLP's {family.title} has no fused weights")
    if kind == "pd":
        same = checkpoint.layout.kind == "pd"
        before = (
            {flag: getattr(checkpoint.layout, flag) for flag in FUSE_FLAGS} if same else fused_before(checkpoint.config)
        )
        return layouts.native_layout(**(before | given), tied=tied, family=family)
    for flag in given:
        raise CheckpointError(f"--{flag}: only for a conversion to PaddleNLP's native layout, not for {mode}")
    return layouts.te_layout(tied, family) if kind == "te" else layouts.hf_layout(tied, family)


def target_of(checkpoint: Checkpoint, layout: Layout, mode: str, format: str | None, degrees: Degrees) -> Target:
    """Return the Target of weights only. Raise CheckpointError for a format or degrees that the layout lacks."""
    tp, pp, vp = degrees
    for name, degree in dict(tensor_parallel_degree=tp, pipeline_parallel_degree=pp, virtual_pp_degree=vp).items():
        if degree is not None and degree < 1:
            raise CheckpointError(f"--{name} {degree}: it must be at least 1")
    if format not in (None, *FORMATS):
        raise CheckpointError(f"--format {format}: it may be {' or '.join(FORMATS)}")
    if layout.kind == "hf":
        if (tp or 1, pp or 1, vp or 1) != (1, 1, 1) or format == "pdparams":
            raise CheckpointError(f"--mode {mode}: Hugging Face's layout is whole and in safetensors, nothing else")
        return Target(layout, safetensors.SUFFIX, 1, 1)
    suffix = f".{format}" if format else checkpoint.suffix
    return Target(layout, suffix, tp or checkpoint.tp, pp or checkpoint.pp, vp or 1)


def unified_target(layout: Layout, mode: str, format: str | None, dtype: str | None) -> Target:
    """Return the Target of a unified checkpoint with its optimizer. Raise CheckpointError where there is none."""
    if layout.kind == "hf":
        raise CheckpointError(
            f"--with_optimizer: Hugging Face's layout has no optimizer state, leave it out with {mode}"
        )
    if format == "pdparams":
        raise CheckpointError(
            "--with_optimizer writes a unified checkpoint in safetensors, from which training resumes in any degrees "
            "with --unified_checkpoint 1: leave --format out"
        )
    if dtype is not None:
        raise CheckpointError(
            "--with_optimizer: the state belongs to weights of the dtype they have, leave --dtype out"
        )
    return Target(layout, safetensors.SUFFIX, 1, 1)
