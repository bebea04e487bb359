"""Check that a file of a checkpoint can be read, and holds only numbers, before Paddle or PaddleNLP loads it.

paddle.load unpickles, and a pickle is a program; PaddleNLP loads whatever file an index names.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_te import commands, typed
from paddle_te.files import real_path
from paddle_te.weights import pdparams, safetensors
from paddle_te.weights.files import read_json
from paddle_te.weights.tensors import CheckpointError

# What is read with paddle.load; training_args.bin is written and never read.
PICKLES = (".pdparams", ".pdopt", ".pth")
TRAINER_STATE = "trainer_state.json"
MOST = {"epoch": 2**31, "consumed_samples": 2**62}  # that a run counts

# What makes a folder of weights loadable; a Trainer's own state (optimizer, scheduler, random state) is not carried.
COMPANIONS = re.compile(
    r"generation_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|spiece\.model|"
    r"sentencepiece.*\.model|chat_template.*|LICENSE.*|README.*|USE_POLICY.*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class TrainerState:
    """trainer_state.json, as PaddleNLP's Trainer reads and writes it. The Trainer documents each field.

    consumed_samples: None in a state that an older Trainer wrote.
    """

    global_step: int = typed.at_least(0)
    epoch: float | None = typed.at_least(0, None)
    consumed_samples: int | None = typed.at_least(0, None)
    max_steps: int = 0
    num_train_epochs: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] | None = None
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None


def check_contents(path: str | Path) -> None:
    """Raise CheckpointError for a file that cannot be read, or whose loading would run code. Runs none itself.

    Reads only weights, their indices and a Trainer's state.
    """
    path = Path(path)
    if path.suffix in PICKLES:
        pdparams.check(path)
    elif path.suffix == safetensors.SUFFIX:
        safetensors.check(path)
    for file_format in (safetensors, pdparams):
        if path.name.endswith(f"{file_format.SUFFIX}.index.json"):
            _check_index(path, file_format.SUFFIX)


def merge_command(adapter: str | Path, base: str | Path = commands.MODEL) -> str:
    """Return the command that merges the adapter in a folder. base: the model's folder."""
    return convert_command(base, "--lora_path", adapter)


def convert_command(folder: str | Path, *words: str | Path) -> str:
    """Return the command that converts the content of a folder, with these further words."""
    return commands.line("convert", "--input_ckpt_path", folder, *words, "--output_ckpt_path", commands.OUTPUT)


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the dict in a JSON file. Raises CheckpointError."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def read_state(folder: str | Path) -> TrainerState:
    """Return the TrainerState in a checkpoint's trainer_state.json. Raises CheckpointError for a damaged one."""
    path = Path(folder) / TRAINER_STATE
    try:
        state = typed.read(TrainerState, read_json(path))
    except typed.NotAsDeclared as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name, most in MOST.items():
        if (getattr(state, name) or 0) > most:
            raise CheckpointError(f"{path}: {name} is {getattr(state, name)}: it must be at most {most}")
    return state


def _check_index(path: Path, suffix: str) -> None:
    for name in files_of_index(path, read_object(path), suffix):
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path.parent / name}: missing; {path.name} names it")


def files_of_index(path: str | Path, content: Any, suffix: str) -> list[str]:
    """Return the names of the files that an index's weight_map names, in order.

    Raises CheckpointError for a name that is not that of a file with this suffix in the index's own folder.
    """
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix):
            raise CheckpointError(f"{path}: names {name!r}, which is no {suffix} file of this folder")
    return sorted(set(weight_map.values()))


def check_own(path: Path) -> None:
    """Raise CheckpointError for a link to a file elsewhere, whose content a copy would carry away.

    The links of Hugging Face's cache, from snapshots/REVISION to blobs beside it, are a checkpoint's own.
    """
    folder, real = real_path(path.parent), real_path(path)
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None
    if folder not in real.parents and real.parent != blobs:
        raise CheckpointError(
            f"{path}: a link to {real}, outside the checkpoint: put the file itself there, or remove it"
        )
