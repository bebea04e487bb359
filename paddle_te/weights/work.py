"""Plan a conversion: which files it writes, from what, and what goes along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paddle_te import manifest
from paddle_te.weights import flex, optimizer
from paddle_te.weights.config import (
    convert_config,
)
from paddle_te.weights.contents import TRAINER_STATE, read_state
from paddle_te.weights.conversion import (
    FORMERS,
    MAX_SHARD_SIZE,
    Conversion,
    Degrees,
    target_layout,
    target_of,
    unified_target,
)
from paddle_te.weights.folder import Checkpoint
from paddle_te.weights.frozen import check_all_trained
from paddle_te.weights.output_files import OutputFile, Plan, Target, check_degrees, plan_new_ranks, plan_same_ranks
from paddle_te.weights.tensors import CheckpointError


@dataclass(frozen=True)
class Work:
    """A conversion that is ready to be written.

    sources: {kind: Checkpoint} of the weights, "", and their optimizer's state. carried: names of the input's files to
    copy. run: the manifest's facts about the run; None: the output gets no manifest. state_groups: those of the plan
    that PaddleFormers' Trainer resumes from.
    """

    target: Target
    sources: Mapping[str, Checkpoint]
    plan: Plan
    carried: list[str]
    run: dict[str, Any] | None = None
    state_groups: list[list[OutputFile]] = field(default_factory=list)

    @property
    def checkpoint(self) -> Checkpoint:
        """The input's weights."""
        return self.sources[""]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(file.nbytes for files in self.plan.groups for file in files)

    def config(self) -> dict[str, Any] | None:
        """Return the output's config.json; None where the input has none."""
        said, dtype = self.checkpoint.config, self.plan.groups[0][0].entries[0].spec.dtype
        return said and convert_config(said, self.checkpoint.layout, self.target.layout, dtype)


def plan_work(checkpoint: Checkpoint, wanted: Conversion) -> Work:
    """Plan a conversion."""
    layout = target_layout(checkpoint, wanted.mode, wanted.fuse_attention_qkv, wanted.fuse_attention_ffn)
    wanted.check_changes()
    if wanted.with_optimizer and wanted.mode not in FORMERS:
        target = unified_target(layout, wanted.mode, wanted.format, wanted.dtype)
    else:
        target = target_of(checkpoint, layout, wanted.mode, wanted.format, wanted.degrees)
    target = replace(target, dtype=wanted.dtype, max_shard_size=wanted.max_shard_size or MAX_SHARD_SIZE)
    if wanted.mode in FORMERS:
        return _for_formers(checkpoint, target, wanted.with_optimizer)
    if wanted.with_optimizer:
        return _with_optimizer(checkpoint, target, wanted.degrees)
    plan = _plan(checkpoint, target, wanted.virtual_pp_degree)
    return Work(target, {"": checkpoint}, plan, list(checkpoint.companions))


def _for_formers(checkpoint: Checkpoint, target: Target, with_optimizer: bool) -> Work:
    """Plan what PaddleFormers' Trainer resumes from. Raises CheckpointError where that cannot be."""
    plan = plan_new_ranks(checkpoint, target, always_index=True)
    sources = {"": checkpoint} | _state_for_formers(checkpoint, with_optimizer, target.dtype)
    state_groups = flex.plan(sources, target.layout)
    carried = list(checkpoint.companions) + _trainer_files_for_formers(checkpoint)
    _run_of(checkpoint)  # raises for a damaged one
    plan = Plan(plan.groups + state_groups, plan.indexes)
    return Work(target, sources, plan, carried, state_groups=state_groups)


def _with_optimizer(checkpoint: Checkpoint, target: Target, degrees: Degrees) -> Work:
    """Plan a unified checkpoint with the optimizer's state. Raises CheckpointError where that cannot be."""
    layout, folder = target.layout, checkpoint.folder
    check_degrees(checkpoint, layout, *degrees)
    check_all_trained(folder)
    sources = {"": checkpoint} | optimizer.open_optimizer(checkpoint)
    kept = optimizer.kept_how(folder)
    unknown = {"the state of --optim muon": kept.get("optim") == "muon"}
    unknown |= {"moments of --optim_moments int8": kept.get("optim_moments") == "int8"}
    for what in (what for what, there in unknown.items() if there):
        raise CheckpointError(
            f"{folder}: --with_optimizer does not convert {what}; a run goes on from it as it is, with "
            "--resume_from_checkpoint"
        )
    plan = _plan_with_optimizer(sources, target)
    carried = list(checkpoint.companions) + optimizer.trainer_files(checkpoint.left_out, checkpoint.layout, layout)
    return Work(target, sources, plan, carried, _run_of(checkpoint))


def _state_for_formers(checkpoint: Checkpoint, with_optimizer: bool, dtype: str | None) -> dict[str, Checkpoint]:
    """Return the opened optimizer of a Checkpoint for PaddleFormers. Raises CheckpointError where there is none."""
    if checkpoint.layout.family.model_type != "llama":
        raise CheckpointError(
            f"{checkpoint.folder}: PaddleFormers makes {checkpoint.layout.family.title} with paddlefleet, whose "
            "checkpoints are not known here; weights alone go there by te2hf or pd2hf"
        )
    if with_optimizer or dtype is not None:
        flag = "with_optimizer" if with_optimizer else "dtype"
        raise CheckpointError(f"--{flag}: a conversion for PaddleFormers takes all state along as it is, leave it out")
    kept = optimizer.kept_how(checkpoint.folder)
    if kept.get("optim") == "muon":
        raise CheckpointError(f"{checkpoint.folder}: the state of --optim muon; PaddleFormers has AdamW's only")
    if kept.get("optim_moments") == "int8":
        raise CheckpointError(
            f"{checkpoint.folder}: moments of --optim_moments int8; PaddleFormers has them in float32 only"
        )
    if not (checkpoint.folder / TRAINER_STATE).is_file():
        raise CheckpointError(f"{checkpoint.folder / TRAINER_STATE}: missing; training cannot go on without it")
    read_state(checkpoint.folder)
    check_all_trained(checkpoint.folder)
    return optimizer.open_optimizer(checkpoint)


def _trainer_files_for_formers(checkpoint: Checkpoint) -> list[str]:
    """Return the files of the schedule and of fp8's scales; random states are each host's own."""
    names = optimizer.trainer_files(checkpoint.left_out, checkpoint.layout, checkpoint.layout)
    if "scheduler.pdparams" not in names:
        raise CheckpointError(f"{checkpoint.folder / 'scheduler.pdparams'}: missing; training cannot go on without it")
    return [name for name in names if name == "scheduler.pdparams" or name.startswith("fp8_state")]


def _run_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the script, step and data of a Checkpoint's run by its manifest, which stay true in another layout.

    None for a checkpoint that is not complete. Raises CheckpointError for one that does not agree with its manifest.
    The output's own manifest would hide the damage.
    """
    if manifest.COMPLETE_MARK not in checkpoint.left_out:
        return None
    if wrong := manifest.damage(checkpoint.folder):
        raise CheckpointError(f"{checkpoint.folder}: damaged, so its training state cannot go on: {'; '.join(wrong)}")
    saved = manifest.read(checkpoint.folder)
    run = saved.run if saved else {}
    return {topic: run[topic] for topic in ("script", "step", "data", "samples") if topic in run}


def _plan(checkpoint: Checkpoint, target: Target, virtual_pp_degree: int | None) -> Plan:
    same_ranks = (target.tp, target.pp) == (checkpoint.tp, checkpoint.pp)
    if same_ranks and virtual_pp_degree is None:
        return plan_same_ranks(checkpoint, target)
    return plan_new_ranks(checkpoint, target)


def _plan_with_optimizer(sources: Mapping[str, Checkpoint], target: Target) -> Plan:
    weights, state = plan_new_ranks(sources[""], target, always_index=True), optimizer.plan_optimizer(sources, target)
    return Plan(weights.groups + state.groups, weights.indexes | state.indexes)
