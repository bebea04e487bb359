"""What lies in a folder, told by the names in it: the checkpoints of a run, the weights of a model, a LoRA adapter.

Opens no file and imports no NumPy: the launcher asks before it starts anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

# What says that a folder holds a LoRA adapter: PEFT's, and PaddleNLP's or PaddleFormers'
PEFT_ADAPTER, PADDLE_ADAPTER = "adapter_config.json", "lora_config.json"
# Patterns of the files with weights of a model, and of either kind of adapter; an index of several files is one, too
MODEL_WEIGHTS = ("model_state*", "model*.safetensors*")
PADDLE_ADAPTER_WEIGHTS = ("lora_model_state*", "peft_model*")
PEFT_ADAPTER_WEIGHTS = ("adapter_model*",)
ALL_WEIGHTS = (*MODEL_WEIGHTS, *PADDLE_ADAPTER_WEIGHTS, *PEFT_ADAPTER_WEIGHTS)

# In a folder that --merge_lora has written: of which base and adapter its weights are, when it is complete
MERGED_FROM = ".merged_from"

# In the folder of a run of pretraining: what its script writes
OUTPUT = "output"


def output_of(run: str | Path, name: str) -> Path:
    """Return where a run has written a file of a name: its folder itself, or else `OUTPUT` in it."""
    return Path(run) if (Path(run) / name).is_file() else Path(run) / OUTPUT


def files_of(folder: str | Path, patterns: Iterable[str]) -> list[Path]:
    """Return the paths in a folder that match one of some patterns, in order."""
    return sorted({path for pattern in patterns for path in Path(folder).glob(pattern)})


def weights_in(folder: str | Path) -> list[Path]:
    """Return the files of weights in a folder itself, of a model or an adapter: a finished run of fine-tuning's."""
    return files_of(folder, ALL_WEIGHTS)


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds a LoRA adapter, and no model."""
    said = any((Path(folder) / name).is_file() for name in (PEFT_ADAPTER, PADDLE_ADAPTER))
    return said and not files_of(folder, MODEL_WEIGHTS)


def checkpoint_folder(output_dir: str | Path, step: int | str) -> Path:
    """Return the folder of a step's checkpoint below output_dir, as the hosts' Trainers call it."""
    return Path(output_dir) / f"checkpoint-{step}"


def step_of(folder: str | Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for a folder of another name."""
    match = re.fullmatch(r"checkpoint-(\d+)", Path(folder).name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: str | Path) -> list[tuple[int, Path]]:
    """Return [(step, folder)] of the checkpoints below output_dir, complete or not, oldest first."""
    folders = Path(output_dir).glob("checkpoint-*")
    return sorted((step, folder) for folder in folders if (step := step_of(folder)) is not None)


def of_run(folder: str | Path) -> str:
    """Return what to say of a run's folder, which holds no weights itself: its newest checkpoint; "" for others."""
    found = [*checkpoints_in(folder), *checkpoints_in(Path(folder) / OUTPUT)]
    return f"; the run's newest checkpoint is {max(found)[1]}" if found else ""
