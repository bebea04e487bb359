"""Convert a checkpoint folder to another layout, format or degree of parallelism, tensor by tensor."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from paddle_te import manifest
from paddle_te.configs.families import is_tied
from paddle_te.files import real_path
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.weights import flex, layouts, optimizer, pdparams, safetensors
from paddle_te.weights.adapters import open_adapter, with_adapter
from paddle_te.weights.config import (
    FUSE_FLAGS,
    GENERATION,
    companion_name,
    convert_config,
    fused_before,
    generation_config,
)
from paddle_te.weights.contents import TRAINER_STATE, check_contents, check_own, read_object, read_state
from paddle_te.weights.files import (
    check_new,
    copy_file,
    new_folder,
    verify_checksums,
    write_checksums,
    write_json,
)
from paddle_te.weights.folder import Checkpoint, open_checkpoint
from paddle_te.weights.frozen import check_all_trained
from paddle_te.weights.layout import Layout
from paddle_te.weights.output_files import OutputFile, Plan, Target, check_degrees, plan_new_ranks, plan_same_ranks
from paddle_te.weights.reader import Reader
from paddle_te.weights.tensors import NUMBERS, CheckpointError, TensorSpec, all_finite, cast
from paddle_te.weights.verification import FULL, Verification

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
    def degrees(self) -> _Degrees:
        return _Degrees(self.tensor_parallel_degree, self.pipeline_parallel_degree, self.virtual_pp_degree)

    def check_changes(self) -> None:
        """Raise CheckpointError where the output would be the input."""
        changes = *self.degrees, self.format, self.dtype, self.max_shard_size, self.lora_path
        if self.mode == "reshard" and not self.with_optimizer and all(change is None for change in changes):
            raise CheckpointError(
                "--mode reshard: nothing would change: give --tensor_parallel_degree, --pipeline_parallel_degree, "
                "--format, --dtype or --max_shard_size"
            )


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
    work = _work(_open(input_path, output_path, wanted, tell), wanted)
    for name in work.carried:
        check_own(work.checkpoint.folder / name)
        check_contents(work.checkpoint.folder / name)
    config = work.config()
    _check_space(output_path, work.nbytes)
    bar = _Bar(total=work.nbytes, unit="B", unit_scale=True, desc=f"writing {output_path}", disable=not progress)
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
    _check_mode(checkpoint, wanted.mode, bool(wanted.lora_path))
    if not wanted.lora_path:
        return checkpoint
    _check_not_around(Path(wanted.lora_path), output_path)
    _check_merging(wanted.mode, wanted.with_optimizer)
    Verification(wanted.verify_checkpoint, tell=tell).check(wanted.lora_path)
    return with_adapter(checkpoint, open_adapter(wanted.lora_path, checkpoint.layout.family))


def _work(checkpoint: Checkpoint, wanted: Conversion) -> _Work:
    """Plan a conversion."""
    layout = _target_layout(checkpoint, wanted.mode, wanted.fuse_attention_qkv, wanted.fuse_attention_ffn)
    wanted.check_changes()
    if wanted.with_optimizer and wanted.mode not in FORMERS:
        target = _unified_target(layout, wanted.mode, wanted.format, wanted.dtype)
    else:
        target = _target(checkpoint, layout, wanted.mode, wanted.format, wanted.degrees)
    target = replace(target, dtype=wanted.dtype, max_shard_size=wanted.max_shard_size or MAX_SHARD_SIZE)
    if wanted.mode in FORMERS:
        return _for_formers(checkpoint, target, wanted.with_optimizer)
    if wanted.with_optimizer:
        return _with_optimizer(checkpoint, target, wanted.degrees)
    plan = _plan(checkpoint, target, wanted.virtual_pp_degree)
    return _Work(target, {"": checkpoint}, plan, list(checkpoint.companions))


class _Degrees(NamedTuple):
    """The output's degrees; None: the input's."""

    tp: int | None
    pp: int | None
    vp: int | None


@dataclass(frozen=True)
class _Work:
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


def _for_formers(checkpoint: Checkpoint, target: Target, with_optimizer: bool) -> _Work:
    """Plan what PaddleFormers' Trainer resumes from. Raises CheckpointError where that cannot be."""
    plan = plan_new_ranks(checkpoint, target, always_index=True)
    sources = {"": checkpoint} | _state_for_formers(checkpoint, with_optimizer, target.dtype)
    state_groups = flex.plan(sources, target.layout)
    carried = list(checkpoint.companions) + _trainer_files_for_formers(checkpoint)
    _run_of(checkpoint)  # raises for a damaged one
    plan = Plan(plan.groups + state_groups, plan.indexes)
    return _Work(target, sources, plan, carried, state_groups=state_groups)


def _with_optimizer(checkpoint: Checkpoint, target: Target, degrees: _Degrees) -> _Work:
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
    return _Work(target, sources, plan, carried, _run_of(checkpoint))


def _write(
    work: _Work, config: dict[str, Any] | None, folder: Path, bar: _Bar, workers: int, checksums: bool
) -> list[str]:
    """Write all files of the output; return the names of the tensors that are not finite."""
    source = work.checkpoint
    broken: list[str] = []  # threads append to it
    _write_all(work.sources, work.target, folder, work.plan.groups, workers, bar, broken)
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
    return broken


def _not_carried(work: _Work, with_state: bool) -> list[str]:
    """Return the names of the input's files whose content is not in the output."""
    left_out = work.checkpoint.left_out
    written = work.carried + [manifest.COMPLETE_MARK, manifest.MANIFEST] * (work.run is not None)
    state = [name for name in left_out if with_state and optimizer.STATE_FILES.fullmatch(name)]
    state += [TRAINER_STATE] * bool(work.state_groups)
    return [name for name in left_out if name not in written + state]


def _check_arguments(input_path: Path, output_path: Path, mode: str, dtype: str | None) -> None:
    if mode not in MODES:
        raise CheckpointError(f"mode {mode!r}: it may be one of {', '.join(MODES)}")
    if dtype not in (None, *NUMBERS):
        raise CheckpointError(f"--dtype {dtype}: it may be one of {', '.join(NUMBERS)}")
    _check_apart(input_path, output_path)
    check_new(output_path)


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
    """Return the step and data of a run, which stay true in another layout, as the manifest of a Checkpoint has them.

    None for a checkpoint that is not complete. Raises CheckpointError for one that does not agree with its manifest:
    the output gets a manifest of its own, which would vouch for the damage.
    """
    if manifest.COMPLETE_MARK not in checkpoint.left_out:
        return None
    if wrong := manifest.damage(checkpoint.folder):
        raise CheckpointError(f"{checkpoint.folder}: damaged, so its training state cannot go on: {'; '.join(wrong)}")
    saved = manifest.read(checkpoint.folder)
    run = saved.run if saved else {}
    return {topic: run[topic] for topic in ("step", "data", "samples") if topic in run}


def _plan(checkpoint: Checkpoint, target: Target, virtual_pp_degree: int | None) -> Plan:
    same_ranks = (target.tp, target.pp) == (checkpoint.tp, checkpoint.pp)
    if same_ranks and virtual_pp_degree is None:
        return plan_same_ranks(checkpoint, target)
    return plan_new_ranks(checkpoint, target)


def _plan_with_optimizer(sources: Mapping[str, Checkpoint], target: Target) -> Plan:
    weights, state = plan_new_ranks(sources[""], target, always_index=True), optimizer.plan_optimizer(sources, target)
    return Plan(weights.groups + state.groups, weights.indexes | state.indexes)


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


def _check_mode(checkpoint: Checkpoint, mode: str, merging: bool) -> None:
    kind = MODES[mode][0]
    if kind is None and not merging and checkpoint.layout.kind == "hf":
        raise CheckpointError(f"{checkpoint.folder}: Hugging Face's layout has no parallel files; use hf2te or hf2pd")
    if kind and checkpoint.layout.kind != kind:
        fitting = [m for m, (source, _) in MODES.items() if source == checkpoint.layout.kind]
        hint = f"--mode may be {' or '.join(fitting)}"
        raise CheckpointError(
            f"{checkpoint.folder}: is in {checkpoint.layout.title} layout, not one for {mode}; {hint}"
        )


def _target_layout(checkpoint: Checkpoint, mode: str, *fuse: bool | None) -> Layout:
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


def _target(checkpoint: Checkpoint, layout: Layout, mode: str, format: str | None, degrees: _Degrees) -> Target:
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


def _unified_target(layout: Layout, mode: str, format: str | None, dtype: str | None) -> Target:
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


def _check_space(output_path: Path, total: int) -> None:
    parent = real_path(output_path).parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if total > free:
        raise CheckpointError(
            f"{output_path}: needs {total / 1e9:.1f} GB, but {parent} has only {free / 1e9:.1f} GB free"
        )


class _Bar(tqdm):
    """A bar that calls `alive` with each step, shown or not."""

    alive: Callable[[], None]

    def update(self, n: float | None = 1) -> bool | None:
        self.alive()
        return super().update(n)


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


def _write_all(
    sources: Mapping[str, Checkpoint],
    target: Target,
    folder: Path,
    groups: Iterable[Sequence[OutputFile]],
    workers: int,
    bar: _Bar,
    broken: list[str],
) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(workers) as pool:  # threads: numpy copies and file reads run without the interpreter's lock
        futures = [pool.submit(_write_files, sources, target, folder, files, bar, stop, broken) for files in groups]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()  # a file may take minutes
            pool.shutdown(cancel_futures=True)
            raise


def _write_files(
    sources: Mapping[str, Checkpoint],
    target: Target,
    folder: Path,
    files: Sequence[OutputFile],
    bar: _Bar,
    stop: threading.Event,
    broken: list[str],
) -> None:
    """Write files that hold different ranks' shares of the same tensors, or one file; sources: {kind: Checkpoint}.

    stop: an Event; once it is set, nothing more is written. broken: gets the names of tensors that are not finite.
    """
    readers = {kind: Reader(checkpoint, target.tp) for kind, checkpoint in sources.items()}
    for file in files:
        (folder / file.name).parent.mkdir(exist_ok=True)
    writers = [_writer(target, folder / file.name, [entry.spec for entry in file.entries]) for file in files]
    for shares in zip(*(file.entries for file in files), strict=True):
        if stop.is_set():
            return
        for file, writer, entry in zip(files, writers, shares, strict=True):
            read = readers[entry.kind].number if entry.kind in optimizer.POWERS else readers[entry.kind].blocks
            arrays = [cast(array, entry.spec) for array in read(file.tp, entry.place)]
            if not all(all_finite(array, entry.spec.dtype) for array in arrays):
                broken.append(entry.spec.name)
            writer.add(arrays)
            bar.update(entry.spec.nbytes)
    for writer in writers:
        writer.close()


def _writer(target: Target, path: Path, specs: Sequence[TensorSpec]) -> pdparams.Writer | safetensors.Writer:
    if target.suffix == pdparams.SUFFIX or path.suffix == flex.SUFFIX:
        return pdparams.Writer(path, specs)
    return safetensors.Writer(path, specs, "pt" if target.layout.kind == "hf" else "np")
