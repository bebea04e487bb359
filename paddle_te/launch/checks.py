"""Checks of a job's arguments against the device and against what lies in the folders they name.

What does not fit raises LaunchError: one line that names the argument and what it may be. What does not go together is
refused by `paddle_te.job.rules`.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_te import configs, recipes
from paddle_te.configs.reading import remarks
from paddle_te.folders import MODEL_WEIGHTS, files_of, is_adapter, of_run, weights_in
from paddle_te.host import PADDLEFORMERS
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.launch.devices import count_gpus
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import extra_flags, trains
from paddle_te.options import BACKENDS
from paddle_te.outputs import check_folder
from paddle_te.planner.model import check_size
from paddle_te.runs.checkpoints import displaced, find_checkpoint, saved_steps

if TYPE_CHECKING:
    from paddle_te.data.tokenizer import Tokenizer

# PaddleNLP's tokenizers whose models have no configuration here
_TOKENIZERS = tuple(f"facebook/llama-{size}" for size in ("7b", "13b", "30b", "65b"))


def _has_download(name: str | None) -> bool:
    """Return whether PaddleNLP knows a tokenizer of this name and downloads it; any other one is a folder."""
    if name is None or "/" not in name or name not in configs.known_names():
        return name in _TOKENIZERS
    return configs.read_model(name).family.model_type in PADDLENLP


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the model's config.json. PaddleFormers has layers of its own for what these ones do not compute."""
    if recipes.find(args.model_name) and not Path(args.model_name).is_dir():
        raise LaunchError(f"model_name: {args.model_name!r} is a recipe; it stands before all other arguments")
    try:
        said = configs.read_model(args.model_name)
        if args.HOST != PADDLEFORMERS:
            configs.check_computed(said, BACKENDS[args.backend])
        config = configs.words_of_model(said)
        check_size(config, said.source)
    except ValueError as error:
        raise LaunchError(f"model_name: {error}") from error
    for remark in remarks(said):
        _tell(remark)
    return config


@cache
def _tell(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def check_here(args: argparse.Namespace, device: str) -> None:
    """Check that Transformer Engine's layers have a GPU to run on."""
    if device == "nvgpu" and args.backend == "te" and not args.DRY_RUN and not count_gpus():
        raise LaunchError("backend=te needs an NVIDIA GPU, and nvidia-smi finds none; on nvgpu's host runtime use pd")


def check_data(args: argparse.Namespace, config: dict[str, Any]) -> str | None:
    """Return the folder of the data set that a model of this configuration can train on; None for mock data."""
    if args.MOCK_DATA:
        return None
    path = Path(args.DATA_PATH or "/dataset").expanduser().absolute()
    if not args.DATA_PATH and not path.is_dir():
        if args.DRY_RUN:  # the machine it is meant for may have it
            print(f"note: there is no {path} here; a run needs DATA_PATH or MOCK_DATA=1", file=sys.stderr)
            return str(path)
        raise LaunchError("DATA_PATH is not set and there is no /dataset; set DATA_PATH=folder, or MOCK_DATA=1")
    if not path.is_dir():
        raise LaunchError(f"DATA_PATH: there is no folder {path}")
    _check_corpora(path, args, config)
    return str(path)


def _check_corpora(folder: Path, args: argparse.Namespace, config: dict[str, Any]) -> None:
    """The folder's .bin/.idx pairs, as far as their beginnings tell."""
    from paddle_te.data import corpus  # here, as it imports NumPy

    if not any(folder.glob("*.idx")):
        raise LaunchError(f"DATA_PATH: {folder} holds no .idx file; prepare it with paddle-te prepare-data")
    try:
        data = corpus.find_data(str(folder))
        for prefix in corpus.prefixes_of(data):
            index = corpus.read_index(prefix)
            if _vocabulary_is_fixed(args):
                corpus.check_vocabulary(prefix, index, config["vocab_size"])
            if (tokens := index.bytes // index.dtype.itemsize) <= args.max_seqlen:
                raise ValueError(f"{prefix}.bin has {tokens} tokens, and max_seqlen={args.max_seqlen} needs one more")
    except (ValueError, OSError) as error:
        raise LaunchError(f"DATA_PATH: {error}") from error


def _vocabulary_is_fixed(args: argparse.Namespace) -> bool:
    """Whether no tokenizer makes the vocabulary larger, as another one than the model's own does from scratch."""
    own = {"", args.model_name, configs.canonical(args.model_name)}
    return args.init_weight != "none" or args.tokenizer_name in own


def check_tokenizer(args: argparse.Namespace) -> str | None:
    """Return the tokenizer's folder, full name, or none; the model's own where the user names none."""
    name = args.tokenizer_name or _own_tokenizer(args)
    if name == "none":
        if not args.MOCK_DATA:
            raise LaunchError("tokenizer_name=none goes with MOCK_DATA=1 only")
        return name
    folder = Path(name).expanduser()
    if folder.is_dir():
        read_tokenizer_folder(folder)
        return str(folder.absolute())
    full = configs.canonical(name) or name
    if not _has_download(full):
        known = filter(_has_download, (*configs.known_names(), *_TOKENIZERS))
        raise LaunchError(f"tokenizer_name: {name!r} is neither a folder nor one of {', '.join(known)}")
    return full


def read_tokenizer_folder(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; None for a class that only a host has. Raises LaunchError for what training refuses."""
    from paddle_te.data.tokenizer import TokenizerError, read_tokenizer  # here, as it imports tokenizers

    try:
        return read_tokenizer(folder)
    except TokenizerError as error:
        raise LaunchError(f"tokenizer_name: {error}") from error


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("tokenizer_config.json", "tokenizer.json", "*.model"))


def _own_tokenizer(args: argparse.Namespace) -> str:
    """The tokenizer of the model: its folder's, or that of its known name. Random tokens need none."""
    folder, known = Path(args.model_name).expanduser(), configs.canonical(args.model_name)
    if (folder / "config.json").is_file():
        own = args.model_name if _has_tokenizer(folder) else None
    else:
        own = known if _has_download(known) else None
    if own is None and not args.MOCK_DATA:
        raise LaunchError(
            f"tokenizer_name: {args.model_name!r} comes without a tokenizer; give the folder of the one with which the "
            "data were prepared"
        )
    return own or "none"


def check_output(args: argparse.Namespace, folder: Path, output_name: str) -> None:
    """Raise LaunchError unless the run's folder can be written or made. output_name: as for `check_start`."""
    try:
        if not args.DRY_RUN:
            check_folder(output_name, folder)
    except ValueError as error:
        raise LaunchError(str(error)) from error


def check_start(args: argparse.Namespace, output: Path, output_name: str) -> None:
    """Where the weights come from: a checkpoint, a converted checkpoint, or neither; never both, and nothing lost.

    output_name: what the user calls the arguments that choose the folder `output`.
    """
    there = saved_steps(output)
    try:
        find_checkpoint(str(args.resume_step), output)
    except FileNotFoundError as error:
        raise LaunchError(f"resume_step={args.resume_step}: {error}") from error
    if trains(args):  # else nothing is written over
        _check_kept(args, output, output_name, there)
    if args.init_weight == "none":
        return
    if args.resume_step != "none" and there:
        raise LaunchError(
            f"init_weight and resume_step={args.resume_step} exclude each other: {output} holds steps {there}; "
            "set one of them to none"
        )
    check_weights("init_weight", args.init_weight)


def _check_kept(args: argparse.Namespace, output: Path, output_name: str, there: str) -> None:
    """Refuse to write over what is in the folder, and to move aside what the run starts from. there: saved steps."""
    moved = {*displaced(output.resolve(), args.resume_step)}
    starts = {"model_name": args.model_name, "init_weight": args.init_weight} | extra_flags(args)
    for name in ("model_name", "init_weight", "lora_path"):
        start = Path(str(starts.get(name))).expanduser().resolve()
        if not moved.isdisjoint({start, *weights_in(start)}):
            raise LaunchError(
                f"{name}: the run reads {start}, and would write over it in {output}; set another {output_name}"
            )
    remedy = f"set another {output_name}, or OVERWRITE=1"
    if args.resume_step == "none" and there and not args.OVERWRITE:
        raise LaunchError(
            f"resume_step=none starts anew, but {output} holds checkpoints (steps {there}); "
            f"resume with auto or a step, {remedy}"
        )
    if not there and (model := weights_in(output)) and not args.OVERWRITE:
        raise LaunchError(
            f"{output} holds a finished model ({model[0].name}) and no checkpoint to go on from; {remedy}"
        )


def check_weights(name: str, value: str) -> None:
    """Check that the argument `name` is a folder with weights."""
    folder = Path(value).expanduser()
    if not value or not folder.is_dir():
        raise LaunchError(f"{name}: there is no folder {value!r}{_fetch(value)}")
    if is_adapter(folder):
        tuned = "give the model's folder, and the adapter with --lora_path"
        remedy = "merge it first, with paddle-te convert --lora_path" if name == "init_weight" else tuned
        raise LaunchError(f"{name}: {value!r} holds a LoRA adapter, not a model: {remedy}")
    if all(path.suffix == ".json" for path in files_of(folder, MODEL_WEIGHTS)):  # an index, if anything
        raise LaunchError(f"{name}: {value!r} holds neither model_state* nor model*.safetensors{of_run(folder)}")


def _fetch(name: str) -> str:
    """Return how to get the weights of a model that Hugging Face has, as PaddleNLP would download them by its name."""
    known = configs.canonical(name) or ""
    return f"; weights are not downloaded: huggingface-cli download {known} --local-dir FOLDER" if "/" in known else ""
