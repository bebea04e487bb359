"""Convert a checkpoint folder to another layout, format or degree of parallelism, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paddle_te import manifest
from paddle_te.files import free_bytes, real_path
from paddle_te.weights import flex, optimizer
from paddle_te.weights.adapters import open_adapter, with_adapter
from paddle_te.weights.config import (
    GENERATION,
    companion_name,
    generation_config,
)
from paddle_te.weights.contents import TRAINER_STATE, check_contents, check_own, read_object
from paddle_te.weights.conversion import (
    FORMERS,
    MODES,
    Conversion,
    check_mode,
)
from paddle_te.weights.files import (
    check_new,
    copy_file,
    new_folder,
    verify_checksums,
    write_checksums,
    write_json,
)
from paddle_te.weights.folder import Checkpoint, open_checkpoint
from paddle_te.weights.output_files import OutputFile
from paddle_te.weights.tensors import NUMBERS, CheckpointError
from paddle_te.weights.verification import Verification
from paddle_te.weights.work import Work, plan_work
from paddle_te.weights.writing import Bar, Writing


def convert(
    input_path: str | Path,
    output_path: str | Path,
    mode: str | None = None,
    *,
    progress: bool = True,
    tell: Callable[[str], None] = print,
    alive: Callable[[], None] = lambda: None,
    **how: Any,
) -> list[str]:
    """Convert a checkpoint folder into a new one; the input is only read.

    Args:
        input_path, output_path: folders; the output must be new or empty. It appears only when it is complete.
        mode: a Conversion's. None: "pd2te", or with lora_path "reshard".
        progress: show a progress bar.
        tell: takes a line of text where the input was not compared with what it has for that, where a part of it is
            left out, and where weights are not finite; they are converted as they are.
        alive: called after each tensor, by any thread.
        how: the other fields of a Conversion.

    Returns: the names of files in the input folder that were not carried over (a Trainer's own state).
    Raises CheckpointError, before anything is written, for an input or arguments that do not fit, for a file to be
    carried over that is a link to elsewhere or would run code when it is loaded, and OSError.
    """
    wanted = Conversion(mode=mode or ("reshard" if how.get("lora_path") else "pd2te"), **how)
    input_path, output_path = Path(input_path), Path(output_path)
    _check_arguments(input_path, output_path, wanted.mode, wanted.dtype)
    work = plan_work(_open(input_path, output_path, wanted, tell), wanted)
    for name in work.carried:
        check_own(work.checkpoint.folder / name)
        check_contents(work.checkpoint.folder / name)
    config = work.config()
    _check_space(output_path, work.nbytes)
    bar = Bar(total=work.nbytes, unit="B", unit_scale=True, desc=f"writing {output_path}", disable=not progress)
    bar.alive = alive
    with bar, new_folder(output_path) as folder:
        broken = _write(work, config, folder, bar, wanted.workers, wanted.checksums)
    if broken:
        tell(_not_finite(output_path, sorted(broken), work.plan.groups))
    return _not_carried(work, wanted.with_optimizer or wanted.mode in FORMERS)


def _open(input_path: Path, output_path: Path, wanted: Conversion, tell: Callable[[str], None]) -> Checkpoint:
    """Compare the input's files first, then open it, and add the adapter if one is given."""
    if input_path.is_dir():
        if wanted.verify:
            verify_checksums(input_path, wanted.workers)
        Verification(wanted.verify_checkpoint, tell=tell if not wanted.verify else _silent).check(input_path)
    checkpoint = open_checkpoint(input_path, wanted.num_attention_heads, wanted.num_key_value_heads)
    if checkpoint.remark:
        tell(checkpoint.remark)
    check_mode(checkpoint, wanted.mode, bool(wanted.lora_path))
    if not wanted.lora_path:
        return checkpoint
    _check_not_around(Path(wanted.lora_path), output_path)
    _check_merging(wanted.mode, wanted.with_optimizer)
    Verification(wanted.verify_checkpoint, tell=tell).check(wanted.lora_path)
    return with_adapter(checkpoint, open_adapter(wanted.lora_path, checkpoint.layout.family))


def _check_arguments(input_path: Path, output_path: Path, mode: str, dtype: str | None) -> None:
    if mode not in MODES:
        raise CheckpointError(f"mode {mode!r}: it may be one of {', '.join(MODES)}")
    if dtype not in (None, *NUMBERS):
        raise CheckpointError(f"--dtype {dtype}: it may be one of {', '.join(NUMBERS)}")
    _check_apart(input_path, output_path)
    check_new(output_path)


def _check_apart(input_path: Path, output_path: Path) -> None:
    source, target = real_path(input_path), real_path(output_path)
    if source == target or source in target.parents:
        raise CheckpointError(f"{output_path}: the output lies inside the input {input_path}; choose another place")
    _check_not_around(input_path, output_path)


def _check_not_around(input_path: Path, output_path: Path) -> None:
    if real_path(output_path) in (real_path(input_path), *real_path(input_path).parents):
        raise CheckpointError(f"{output_path}: the input {input_path} lies inside the output; choose another place")


def _check_merging(mode: str, with_optimizer: bool) -> None:
    if mode in FORMERS or with_optimizer:
        flag = f"--mode {mode}" if mode in FORMERS else "--with_optimizer"
        raise CheckpointError(
            f"{flag} with --lora_path: the optimizer's state is not that of merged weights; leave it out"
        )


def _write(
    work: Work, config: dict[str, Any] | None, folder: Path, bar: Bar, workers: int, checksums: bool
) -> list[str]:
    """Write all files of the output; return the names of the tensors that are not finite."""
    source = work.checkpoint
    writing = Writing(work.sources, work.target, folder, bar)
    writing.write(work.plan.groups, workers)
    for name in work.carried:
        new_name = companion_name(name, work.carried, source.layout, work.target.layout)
        if name == GENERATION and work.target.layout.kind == "hf" != source.layout.kind:
            write_json(folder / name, generation_config(read_object(source.folder / name)))
        else:
            copy_file(source.folder / name, folder / new_name)
    for name, content in (work.plan.indexes | ({"config.json": config} if config else {})).items():
        write_json(folder / name, content)
    if work.state_groups:
        flex.write_metadata(folder, work.state_groups)
        flex.write_trainer_state(folder / flex.TRAINER_STATE, read_object(source.folder / TRAINER_STATE))
        (folder / flex.SIGNAL).write_text("1")
    if checksums:
        write_checksums(folder, workers)
    if work.run is not None:
        files = manifest.records(folder, manifest.file_names(folder), workers)
        manifest.mark_complete(folder, manifest.Manifest(files, work.run))
    return writing.broken


def _not_carried(work: Work, with_state: bool) -> list[str]:
    """Return the names of the input's files whose content is not in the output."""
    left_out = work.checkpoint.left_out
    written = work.carried + [manifest.COMPLETE_MARK, manifest.MANIFEST] * (work.run is not None)
    state = [name for name in left_out if with_state and optimizer.STATE_FILES.fullmatch(name)]
    state += [TRAINER_STATE] * bool(work.state_groups)
    return [name for name in left_out if name not in written + state]


def _check_space(output_path: Path, total: int) -> None:
    parent = real_path(output_path).parent
    while not parent.exists():
        parent = parent.parent
    free = free_bytes(parent)
    if total > free:
        raise CheckpointError(
            f"{output_path}: needs {total / 1e9:.1f} GB, but {parent} has only {free / 1e9:.1f} GB free"
        )


def _silent(line: str) -> None:
    """Tell nobody."""


def _not_finite(output_path: Path, names: Sequence[str], groups: Iterable[Sequence[OutputFile]]) -> str:
    """Say which tensors were converted although they hold numbers that are not finite."""
    tensors = sum(len(file.entries) for files in groups for file in files)
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return (
        f"{output_path}: {len(names)} of {tensors} tensors hold NaN or infinity, as they did before: "
        f"{', '.join(names[:3])}{more}"
    )
