"""Tell in which degrees of parallelism a training checkpoint was saved, and in which ones it can be resumed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from paddle_te.weights.contents import TRAINER_STATE
from paddle_te.weights.folder import Checkpoint
from paddle_te.weights.layout import Layout
from paddle_te.weights.opened import opened
from paddle_te.weights.optimizer import is_unified, shard_files
from paddle_te.weights.output_files import check_degrees
from paddle_te.weights.tensors import CheckpointError


@dataclass(frozen=True)
class Degrees:
    """The numbers of ranks that divide a model and its optimizer. Data parallelism leaves no trace in a checkpoint."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sharding: int = 1
    expert_parallel: int = 1

    def __str__(self) -> str:
        divided = {field.name: getattr(self, field.name) for field in fields(self)}
        text = ", ".join(f"{name.replace('_', ' ')} {degree}" for name, degree in divided.items() if degree > 1)
        return text or "undivided"


def saved_degrees(checkpoint: Checkpoint) -> Degrees | None:
    """Return the Degrees that the files of an opened checkpoint are divided by; None for a unified one."""
    if is_unified(checkpoint.folder):
        return None
    rank = next(iter(checkpoint.ranks.values()))
    return Degrees(checkpoint.tp, checkpoint.pp, max(len(shard_files(checkpoint.folder, rank.variant)), 1), rank.ep)


def check_reshardable(
    checkpoint: Checkpoint,
    degrees: Degrees,
    virtual: int = 1,
    layout: Layout | None = None,
    with_optimizer: bool = True,
) -> None:
    """Check that training can go on from an opened checkpoint in other degrees.

    Args:
        degrees: the new ones; virtual: of virtual pipeline stages.
        layout: of the weights in the new run; None: the checkpoint's.
        with_optimizer: the optimizer's state goes along (otherwise --ignore_load_lr_and_optim).

    Raises CheckpointError where the model cannot be split so, or the optimizer's state is missing or not whole.
    """
    check_degrees(checkpoint, layout or checkpoint.layout, degrees.tensor_parallel, degrees.pipeline_parallel, virtual)
    experts = checkpoint.dims.spec.experts
    if degrees.expert_parallel > 1 and (experts is None or experts.experts % degrees.expert_parallel):
        raise CheckpointError(
            f"{checkpoint.folder}: its {experts.experts if experts else 0} experts cannot be divided by "
            f"expert_parallel_degree={degrees.expert_parallel}"
        )
    if not with_optimizer:
        return
    opened(checkpoint.folder).optimizer  # noqa: B018 (whose files are compared as it is made)
    for name in (TRAINER_STATE, "scheduler.pdparams"):
        if not (checkpoint.folder / name).is_file():
            raise CheckpointError(f"{checkpoint.folder / name}: missing; training cannot go on from where it was")


def why_not_resumable(folder: str | Path, degrees: Degrees, virtual: int = 1) -> str | None:
    """Say why training cannot go on from a checkpoint folder in these degrees, in one line; None where it can.

    Reads names and shapes only, and needs no Paddle: the launcher asks before it starts fewer ranks. It does not
    compare the run's model, precision and backend with the checkpoint's.
    """
    try:
        check_reshardable(opened(folder).checkpoint, degrees, virtual)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None
