"""Which checkpoint to resume from."""

import re
from pathlib import Path

# PaddleNLP's name for it; written last, when every file of every rank is there
COMPLETE_MARK = ".checkpoint_done"
# in output_dir: training was asked to stop, saved and ended before its last step, whose number it holds
STOPPED_MARK = "stopped"


def is_complete(folder):
    return (Path(folder) / COMPLETE_MARK).is_file()


def complete_checkpoints(output_dir):
    """[(step, folder)] of the complete checkpoints below output_dir, oldest first."""
    found = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and is_complete(folder):
            found.append((int(match[1]), folder))
    return sorted(found)


def find_checkpoint(resume, output_dir):
    """The folder that `resume` means, as str, or None for a start from scratch.

    resume: None or "none"; "auto", the latest complete checkpoint below output_dir, if any; a step number; a folder.
    Raises FileNotFoundError for a step or folder that is not there or not complete, with the steps there are.
    """
    if resume in (None, "none", False):
        return None
    there = complete_checkpoints(output_dir)
    if resume == "auto":
        return str(there[-1][1]) if there else None
    folder = Path(output_dir) / f"checkpoint-{resume}" if str(resume).isdigit() else Path(resume)
    if is_complete(folder):
        return str(folder)
    state = "not complete: training stopped while it was written" if folder.is_dir() else "not there"
    steps = ", ".join(str(step) for step, _ in there) or "none"
    raise FileNotFoundError(f"checkpoint {folder} is {state}; complete checkpoints in {output_dir}: {steps}")
