"""What a run resumes from: the newest checkpoint that is good, and whether it is this run's.

All ranks look at a checkpoint together, each reads its share of the files, and all come to the same answer, before any
weight is made.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paddle_te import fp8, manifest
from paddle_te.data.course import Course
from paddle_te.distributed import gather_objects
from paddle_te.folders import step_of
from paddle_te.host import HostArguments
from paddle_te.hosts.paddlenlp.loading import read_config
from paddle_te.hosts.paddlenlp.training.early_stopping import has_stopped
from paddle_te.hosts.paddlenlp.training.resharding import broken_state
from paddle_te.job import PRETRAIN
from paddle_te.models.decoder import recipe_of
from paddle_te.runs import identity, verify
from paddle_te.runs.checkpoints import find_checkpoint, set_aside
from paddle_te.weights import CheckpointError
from paddle_te.weights.contents import read_state
from paddle_te.weights.opened import opened

logger = logging.getLogger(__name__)


def find_to_resume(args: HostArguments) -> str | None:
    """Return the folder that --resume_from_checkpoint means, as str, or None for a start from scratch.

    With "auto", newer checkpoints that are damaged are told in the log and moved out of the way (`set_aside`).
    args: PaddleNLP's TrainingArguments with verify_checkpoint. Raises as `find_checkpoint`.
    """

    def check(folder: Path) -> list[str]:
        mine = verify.damage(folder, args.verify_checkpoint, args.process_index, args.world_size)
        if not mine and args.process_index == 0:
            mine = broken_state(folder, args)
        return list(dict.fromkeys(line for lines in gather_objects(mine, args.world_size) for line in lines))

    passed_over: list[str] = []
    checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir, check, passed_over.append)
    for line in passed_over:
        logger.warning(line)
    if checkpoint and passed_over and args.process_index == 0:
        step = step_of(checkpoint)
        assert step is not None  # only "auto" passes some over, and finds the others by their steps
        kept = set_aside(args.output_dir, step)
        logger.warning(f"this run resumes from {checkpoint}; the checkpoints of later steps were moved to {kept}")
    if checkpoint and args.load_best_model_at_end:
        _check_best(checkpoint, check)
    if checkpoint and manifest.read(checkpoint) is None:
        logger.warning(
            f"{checkpoint} has no {manifest.MANIFEST} (an older version wrote it): that nothing in it has changed "
            "cannot be checked"
        )
    return checkpoint


def compared_before(checkpoint: str | Path, level: str) -> tuple[str, bool]:
    """Return (in words, whether) what is loaded agreed with its manifest when `find_to_resume` found the checkpoint."""
    if manifest.read(checkpoint) is None:
        return "without a manifest", False
    words = {"full": "sizes and checksums agree with its manifest", "size": "sizes agree with its manifest"}
    return words.get(level, f"not compared with its manifest (--verify_checkpoint {level})"), level in words


def _check_best(checkpoint: str, check: Callable[[Path], list[str]]) -> None:
    """Check the other folder with whose weights the run would end, which the Trainer's state names."""
    best = read_state(checkpoint).best_model_checkpoint
    if best and not Path(best).is_dir():
        raise CheckpointError(
            f"{checkpoint} names {best} as the best checkpoint, which is not there: put it there, or leave out "
            "--load_best_model_at_end"
        )
    if best and (wrong := check(Path(best))):
        raise CheckpointError(f"{checkpoint} names {best} as the best checkpoint, which is damaged: {'; '.join(wrong)}")


def final_weights(checkpoint: str, args: HostArguments) -> str:
    """Return the folder whose weights a run ends with that is finished with a checkpoint."""
    best = read_state(checkpoint).best_model_checkpoint if args.load_best_model_at_end else None
    return best or checkpoint


def check_fits(checkpoint: str, model: Mapping[str, Any], data: Mapping[str, Any] | None, args: HostArguments) -> None:
    """Refuse a checkpoint of another script or model, or of a run with other data.

    Args:
        checkpoint: its folder.
        model: what says which model this run trains, `identity.model_values` of its configuration as it will be built.
        data: what says which data this run reads, a dict; `data_identity` of the datasets.
        args: PaddleNLP's TrainingArguments.

    Raises CheckpointError that names the values which differ, and for a checkpoint without the state to go on from.
    """
    saved = manifest.read(checkpoint)
    run = saved.run if saved else {}
    _check_script(checkpoint, run.get("script", args.SCRIPT), args.SCRIPT)
    if "adapter" not in model:  # a whole model's weights are translated from the other backend's (`resharding`)
        model = {name: value for name, value in model.items() if name != "weights"}
    if differ := identity.differences(run.get("model") or _model_in(Path(checkpoint)), model):
        raise CheckpointError(
            f"{checkpoint} is of another model: {', '.join(differ)}; resume with the same model, or start another run "
            "in another --output_dir"
        )
    if not args.ignore_data_skip:
        _check_data(checkpoint, run.get("data"), data or {})
    if not args.ignore_load_lr_and_optim:
        _check_state(Path(checkpoint))


def _check_script(checkpoint: str, there: str, here: str) -> None:
    if there != here:
        flag = "te_init_weight_path" if here == PRETRAIN else "model_name_or_path"
        raise CheckpointError(
            f"{checkpoint} was saved by run_{there}.py, and its step, schedule and optimizer mean nothing to "
            f"run_{here}.py: start from its weights, --{flag} {checkpoint}, in another --output_dir"
        )


def _check_data(checkpoint: str, there: Mapping[str, Any] | None, here: Mapping[str, Any]) -> None:
    instead = "or say with --ignore_data_skip true that this run reads its own from the beginning"
    if differ := identity.differences(there or {}, here):
        raise CheckpointError(
            f"{checkpoint} is of a run with other data: {', '.join(differ)}; resume with the same data, {instead}"
        )
    if there and "seed" in here and "seed" not in there:
        raise CheckpointError(
            f"{checkpoint} is of an older version, which shuffled the samples whatever --seed was: go on with that "
            f"version, {instead}"
        )


def _model_in(checkpoint: Path) -> dict[str, Any]:
    """Return what config.json and weights of an older or converted checkpoint tell of the model; {} of an adapter."""
    if not (checkpoint / "config.json").is_file() or any(checkpoint.glob("lora_*")):
        return {}
    layout = opened(checkpoint).checkpoint.layout
    weights = "Transformer Engine's" if layout.kind == "te" else identity.native_weights(layout)
    return identity.model_values(read_config(checkpoint)) | {"weights": weights}


def _check_state(checkpoint: Path) -> None:
    for pattern in ("optimizer*", "scheduler.pdparams"):
        if not any(checkpoint.glob(pattern)):
            raise CheckpointError(
                f"{checkpoint} has no {pattern.rstrip('*')}: --ignore_load_lr_and_optim true takes its weights only"
            )


def check_fp8_state(checkpoint: str | Path, args: HostArguments) -> None:
    """Refuse to go on under delayed scaling without the scales, or under another recipe: resume would not be exact.

    args: the run's TrainingArguments. Raises ValueError, naming the flags that differ.
    """
    recipe = recipe_of(args)
    if recipe is None or recipe.kind != "delayed":
        return
    files = sorted(Path(checkpoint).glob("fp8_state.*.pdparams"))
    if not files:
        raise ValueError(
            f"{checkpoint} has no fp8 scaling state (it was saved in another precision, or converted): start from its "
            "weights instead of resuming (--te_init_weight_path, in fine-tuning --model_name_or_path)"
        )
    fp8.check_file(files[0], recipe)


def is_finished(course: Course | None, args: HostArguments) -> bool:
    """Return whether the run whose Course this is has no step left to train; say so in the log.

    course: None where nothing is trained.
    """
    if course is None or not course.first:
        return False
    if has_stopped(args.resume_from_checkpoint, args):
        return True
    last = args.max_steps if args.max_steps > 0 else course.last_step(args.num_train_epochs)
    if course.first < last:
        return False
    asked = f"--max_steps {args.max_steps}" if args.max_steps > 0 else f"--num_train_epochs {args.num_train_epochs:g}"
    of = f"{args.resume_from_checkpoint} is of step {course.first}"
    logger.info(f"{of}: the run is finished with {asked}; nothing is trained or saved")
    return True
