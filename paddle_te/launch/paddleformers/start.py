"""What a model starts from, as the one folder that PaddleFormers reads: config.json, tokenizer, weights."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.data.tokenizer import Tokenizer, load_tokenizer, portable_files
from paddle_te.launch.errors import LaunchError
from paddle_te.weights import safetensors
from paddle_te.weights.config import convert_config
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.layouts import hf_layout, te_layout
from paddle_te.weights.tensors import CheckpointError

START = "start"  # in the run's folder
UNKNOWN, END = "<unk>", "</s>"
VOCABULARY_MULTIPLE = 128  # GEMMs want it
# Files of a folder with a tokenizer that are not the tokenizer's
_OTHERS = ("config.json", "generation_config.json", "trainer_state.json")
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def start_files(
    args: argparse.Namespace, flags: dict[str, Any], config: dict[str, Any], folder: Path, device: str
) -> dict[Path, str | Path]:
    """{file of the folder: its text, or the file that it links to}.

    flags: the job's, in PaddleNLP's names. config: the model's config.json.
    Raises LaunchError for weights and tokenizers that PaddleFormers would not read.
    """
    tokenizer, vocabulary = _tokenizer(str(flags.get("tokenizer_name_or_path")))
    pretrains = "max_seq_length" in flags
    weights = flags.get("te_init_weight_path") if pretrains else flags["model_name_or_path"]
    config = _hugging_face(config)
    if pretrains and weights is None:
        config["max_position_embeddings"] = _positions(config["max_position_embeddings"], args.max_seqlen)
        rounded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        config["vocab_size"] = max(config["vocab_size"], rounded if vocabulary > 2 else 0)
    config |= {"fuse_rms_norm": device == "gpu"}  # of PaddleFormers' own layers, whose kernel is for paddlepaddle-gpu
    files = {"config.json": json.dumps(config, indent=2) + "\n", **tokenizer}
    if weights is not None:
        name = "init_weight" if pretrains else "model_name"
        files |= _weights(name, Path(weights).expanduser().absolute(), config)
    _check_tokens(flags.get("input_dir"), config["vocab_size"])
    return {folder / name: content for name, content in files.items()}


def _positions(there: int, length: int) -> int:
    if length > there:
        print(
            f"launch: the model gets {length} positions, for max_seqlen {length}: its configuration has {there}",
            file=sys.stderr,
        )
    return max(there, length)


def _hugging_face(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json in Hugging Face's words, which are PaddleFormers'."""
    if "transformers_version" in config or "torch_dtype" in config:
        return dict(config)
    family = family_of(config)
    try:
        return convert_config(config, te_layout(family=family), hf_layout(family=family), "float32")
    except CheckpointError as error:
        raise LaunchError(f"model_name: {error}") from error


def _tokenizer(name: str) -> tuple[dict[str, str | Path], int]:
    """The tokenizer's files, and how many tokens it knows."""
    if name == "none":
        return {**two_tokens()}, 2
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise LaunchError(f"tokenizer_name: {name!r} is no folder, and PaddleFormers downloads no tokenizer here")
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise LaunchError(f"tokenizer_name: {error}") from error
    if (folder / "tokenizer.json").is_file():
        files = [path for path in folder.iterdir() if path.is_file() and _is_tokenizers(path)]
        return {path.name: path for path in files}, tokenizer.needed_rows
    if not isinstance(tokenizer, Tokenizer):
        raise LaunchError(f"tokenizer_name: {folder} needs a tokenizer.json, which PaddleFormers reads")
    return {**portable_files(tokenizer)}, tokenizer.needed_rows


def _is_tokenizers(path: Path) -> bool:
    return (
        path.name not in _OTHERS
        and not path.name.startswith(".")
        and (path.suffix in (".json", ".model", ".txt", ".jinja") and not path.name.endswith(_WEIGHTS))
    )


def two_tokens() -> dict[str, str]:
    """{file: its text} of a tokenizer that is asked for, and not used."""
    tokens = {UNKNOWN: 0, END: 1}
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [dict(id=number, content=token) | special for token, number in tokens.items()]
    kept = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": UNKNOWN}
    config = dict(tokenizer_class="PreTrainedTokenizerFast", unk_token=UNKNOWN, eos_token=END, pad_token=END)
    return {
        "tokenizer.json": json.dumps({"version": "1.0", "added_tokens": added, **kept, "model": model}),
        "tokenizer_config.json": json.dumps(config),
    }


def _weights(name: str, folder: Path, config: dict[str, Any]) -> dict[str, Path]:
    """Links to the files of weights. Raises LaunchError unless they are this model's, under Hugging Face's names."""
    files = [path for path in folder.iterdir() if path.name.endswith(_WEIGHTS)]
    try:
        there = {key for path in files if path.suffix == safetensors.SUFFIX for key in safetensors.read(path)}
    except CheckpointError as error:
        raise LaunchError(f"{name}: {error}") from error
    family = family_of(config)
    layout = hf_layout(is_tied(config), family)
    wanted = [layout.full_name(place) for place in layout.tensors(spec_of(config))]
    if missing := [key for key in wanted if key not in there]:
        raise LaunchError(
            f"{name}: {folder} lacks {missing[0]} (and {len(missing) - 1} more of {len(wanted)}): PaddleFormers reads "
            "Hugging Face's names and safetensors; paddle-te convert --mode te2hf or pd2hf writes them"
        )
    try:
        if (folder / "config.json").is_file():
            open_checkpoint(folder)
    except CheckpointError as error:
        raise LaunchError(f"{name}: {error}") from error
    return {path.name: path for path in files}


def _check_tokens(data: str | None, vocabulary: int) -> None:
    """Raises LaunchError where a corpus says that it has token ids which the model has not."""
    from paddle_te.data import corpus  # here, as it imports NumPy

    if data is None or not Path(data).is_dir():
        return
    try:
        for path in Path(data).glob("*.idx"):
            prefix = str(path.with_suffix(""))
            corpus.check_vocabulary(prefix, corpus.read_index(prefix), vocabulary)
    except (ValueError, OSError) as error:
        raise LaunchError(f"DATA_PATH: {error}") from error
