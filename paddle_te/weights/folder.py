"""Open checkpoint folders and check that they hold a whole model.

PaddleNLP's file names: model_state.pdparams or model.safetensors; in several shards model_state-00001-of-00003.pdparams
with model_state.pdparams.index.json; one rank's share model_state.tp00_pp01.pdparams (its shards and index likewise).
Where ranks divide the experts, each one's are in a file of their own, model_state.pp01_ep00.pdparams, beside what all
ranks have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from paddle_te.configs import ModelConfig
from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.folders import MERGED_FROM, is_adapter, of_run
from paddle_te.weights import mxfp4, pdparams, safetensors
from paddle_te.weights.agreement import check_agreement, check_biases
from paddle_te.weights.config import native_words, read_config
from paddle_te.weights.contents import COMPANIONS, convert_command, files_of_index, merge_command
from paddle_te.weights.dims import Dims
from paddle_te.weights.files import CHECKSUMS, read_json
from paddle_te.weights.float8 import BlockScaledRef, with_scales
from paddle_te.weights.layout import Layout
from paddle_te.weights.layouts import detect, layouts_of
from paddle_te.weights.tensors import CheckpointError, Shape, StackedRef, StoredTensor, TensorRef, same_bytes

if TYPE_CHECKING:
    from paddle_te.weights.adapters import Adapter

RankKey: TypeAlias = tuple[int | None, int | None]  # tensor and pipeline parallel ranks; None: not divided so

_WEIGHTS = re.compile(
    r"(?P<stem>model_state|model)"
    r"(?:\.(?P<variant>(?:tp(?P<tp>\d{2,}))?_?(?:pp(?P<pp>\d{2,}))?_?(?:ep(?P<ep>\d{2,}))?))?"
    r"(?:-(?P<shard>\d{5,})-of-(?P<shards>\d{5,}))?"  # DeepSeek-V3's are model-00001-of-000163
    r"(?P<suffix>\.pdparams|\.safetensors)"
)
_STEMS = {".pdparams": "model_state", ".safetensors": "model"}
_FORMATS = {".pdparams": pdparams, ".safetensors": safetensors}

# Buffers that older checkpoints hold and that are computed from config.json
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
# The backends that read a layout as it is, in the words of the scripts and of the launcher
_READERS = {"pd": "take the backend none, or ", "te": "take the backend transformer_engine (te) or paddle (pd), or "}


def variant(tp: int | None, pp: int | None) -> str:
    """Return PaddleNLP's file name part of a rank: "tp00_pp01", "tp00", "pp01" or ""."""
    return "_".join(f"{axis}{rank:02d}" for axis, rank in (("tp", tp), ("pp", pp)) if rank is not None)


def file_name(suffix: str, rank_variant: str = "", shard: int | None = None, shards: int | None = None) -> str:
    """Return the name of a weights file, e.g. model_state.tp00-00001-of-00002.pdparams."""
    part = f".{rank_variant}" if rank_variant else ""
    number = f"-{shard:05d}-of-{shards:05d}" if shards else ""
    return f"{_STEMS[suffix]}{part}{number}{suffix}"


def index_name(suffix: str, rank_variant: str = "") -> str:
    """Return the name of the index of several shards, e.g. model_state.pdparams.index.json."""
    part = f".{rank_variant}" if rank_variant else ""
    return f"{_STEMS[suffix]}{suffix}.index{part}.json"


@dataclass
class Rank:
    """One rank's files: all tensors by name; `index` is the index file's content, None for a single file.

    ep: how many ranks have divided the experts; there is a file for each then.
    """

    tp: int | None
    pp: int | None
    files: list[Path]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    index: dict[str, Any] | None = None
    ep: int = 1

    @property
    def variant(self) -> str:
        """The rank's part of the file name."""
        return variant(self.tp, self.pp)


@dataclass
class Checkpoint:
    """An opened checkpoint folder; see `open_checkpoint`.

    adapter: an Adapter that its weights are read with. remark: what of the folder is left out, in a line.
    """

    folder: Path
    suffix: str
    config: dict[str, Any] | None
    ranks: dict[RankKey, Rank]
    layout: Layout
    dims: Dims
    tp: int
    pp: int
    companions: list[str]
    left_out: list[str]
    tied: bool
    adapter: Adapter | None = None
    remark: str | None = None

    @property
    def files(self) -> list[Path]:
        """The paths of the files that hold tensors."""
        return sorted({ref.path for rank in self.ranks.values() for ref in rank.tensors.values()})


def open_checkpoint(
    folder: str | Path, num_attention_heads: int | None = None, num_key_value_heads: int | None = None
) -> Checkpoint:
    """Read names, shapes and places of all tensors in a folder and check that they make a whole model.

    Args:
        folder: the checkpoint.
        num_attention_heads, num_key_value_heads: needed where there is no config.json; otherwise they must agree.

    Returns: Checkpoint. Raises CheckpointError, naming the file, for anything missing, truncated, foreign, mixed or of
    another shape than config.json says.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    suffix, ranks = _find_ranks(folder)
    for rank in ranks.values():
        _read_rank(folder, suffix, rank)
    said = read_config(folder)
    config, sizes = (said.content, _sizes(said)) if said else (None, None)
    if said and said.part:
        for rank in ranks.values():
            rank.tensors = _of_the_language_model(rank.tensors)
    without = [_without_further_layers(rank, said) for rank in ranks.values()] if said else []
    layout = _detect(ranks, sizes)
    for rank in ranks.values():
        _stack_experts(rank, layout, _FORMATS[suffix])
    tp, pp = _degrees(folder, suffix, ranks)
    heads = _heads(folder, sizes, num_attention_heads, num_key_value_heads)
    dims = _dims(sizes or _config_of_tensors(folder, heads[0], ranks, layout, tp), heads)
    weights = {file.name for rank in ranks.values() for file in rank.files}
    weights |= {index_name(suffix, rank.variant) for rank in ranks.values()} | {"config.json", CHECKSUMS, MERGED_FROM}
    others = sorted(path.name for path in folder.iterdir() if path.name not in weights)
    companions = [name for name in others if COMPANIONS.fullmatch(name) and (folder / name).is_file()]
    left_out = [name for name in others if name not in companions]
    checkpoint = Checkpoint(folder, suffix, config, ranks, layout, dims, tp, pp, companions, left_out, is_tied(sizes))
    checkpoint.remark = "; ".join(_remarks(checkpoint, said, any(without))) or None
    check_agreement(checkpoint)
    return checkpoint


def _of_the_language_model(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return {name: tensor} of the language model in one that sees pictures, too, whose other tensors are left out."""
    prefix = "language_model."
    return {name.removeprefix(prefix): ref for name, ref in tensors.items() if name.startswith(prefix)}


def _remarks(checkpoint: Checkpoint, said: ModelConfig | None, without: bool) -> Iterator[str]:
    """Yield what is told of a folder. without: weights that predict further tokens are left out."""
    if said and said.left_out:
        yield said.left_out
    if said and without:
        layers = said.record.num_hidden_layers
        yield f"{checkpoint.folder}: the weights from layer {layers} on, which predict further tokens, are left out"
    if any(isinstance(ref, BlockScaledRef) for rank in checkpoint.ranks.values() for ref in rank.tensors.values()):
        yield f"{checkpoint.folder}: weights in fp8 are read as bfloat16, by the scales of their blocks"


def _without_further_layers(rank: Rank, said: ModelConfig) -> bool:
    """Leave out what predicts further tokens (DeepSeek-V3) and lies behind the layers; return whether it was there."""
    first, count = said.record.num_hidden_layers, getattr(said.record, "num_nextn_predict_layers", 0) or 0
    prefixes = tuple(f"model.layers.{number}." for number in range(first, first + count))
    kept = {name: ref for name, ref in rank.tensors.items() if not name.startswith(prefixes)} if prefixes else None
    if kept is None or len(kept) == len(rank.tensors):
        return False
    rank.tensors = kept
    return True


def dims_of(folder: Path) -> Dims:
    """Return the Dims of the model in a folder's config.json. Raises CheckpointError."""
    said = read_config(folder)
    if said is None:
        raise CheckpointError(f"{folder / 'config.json'}: missing; it says how the weights are divided")
    config = _sizes(said)
    return _dims(config, _heads(folder, config, None, None))


def _sizes(said: ModelConfig) -> dict[str, Any]:
    """Return a ModelConfig's values in PaddleNLP's words, which leave out a tied head where the family has it."""
    tied = getattr(said.record, "tie_word_embeddings", False)
    return {"tie_word_embeddings": tied} | native_words(said) | {"num_key_value_heads": said.record.kv_heads}


def check_layout(folder: str | Path, layout: str, hf: bool = False) -> Checkpoint:
    """Return the opened Checkpoint of a folder in the layout "native" or "te".

    hf: Hugging Face's layout will do, too. Raises CheckpointError unless the folder holds a whole checkpoint in such a
    layout, where PaddleNLP's from_pretrained would only warn and leave the layers at random weights.
    """
    checkpoint, wanted = open_checkpoint(folder), {"native": "pd", "te": "te"}[layout]
    found = checkpoint.layout
    if found.kind != wanted and not (hf and found.kind == "hf"):
        mode = f"{found.kind}2{wanted}"
        raise CheckpointError(
            f"{folder}: is in {found.title} layout, not in the {layout} layout that this backend needs; "
            f"{_READERS.get(found.kind, '')}convert it: {convert_command(folder, '--mode', mode)}"
        )
    return checkpoint


def _weight_files(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return [(path, match of its name)] of the weight files in a folder, in order, all of one format.

    Raises CheckpointError, also where there are none: it says what the folder holds instead.
    """
    matches = [(path, match) for path in sorted(folder.iterdir()) if (match := _WEIGHTS.fullmatch(path.name))]
    matches = [(path, m) for path, m in matches if m["stem"] == _STEMS[m["suffix"]]]
    for path in folder.glob("model_state*.pdparams"):
        if not _WEIGHTS.fullmatch(path.name):
            raise CheckpointError(
                f"{path}: not one of the file names that are understood (tensor and pipeline parallel)"
            )
    if not matches and is_adapter(folder):
        raise CheckpointError(
            f"{folder}: holds a LoRA adapter, not a model: give the model's folder here, and the adapter with "
            f"--lora_path; {merge_command(folder)} makes a model of both"
        )
    if not matches:
        torch = " (pytorch_model*.bin is not read: save the model as safetensors)" * any(folder.glob("pytorch_model*"))
        raise CheckpointError(
            f"{folder}: no model_state*.pdparams and no model*.safetensors in it{torch}{of_run(folder)}"
        )
    if len({match["suffix"] for _, match in matches}) > 1:
        raise CheckpointError(f"{folder}: holds both .pdparams and .safetensors weights: move one of them away")
    return matches


def _find_ranks(folder: Path) -> tuple[str, dict[RankKey, Rank]]:
    """Return (suffix, {(tp, pp): Rank}) of the weight files in a folder."""
    matches = _weight_files(folder)
    ranks: dict[RankKey, Rank] = {}
    shard_counts: dict[RankKey, str | None] = {}
    for path, match in matches:
        tp, pp = (int(match[axis]) if match[axis] else None for axis in ("tp", "pp"))
        key = tp, pp
        rank = ranks.setdefault(key, Rank(tp, pp, files=[]))
        if int(match["ep"] or 0) not in (0, len(rank.files)):  # they are in order
            raise CheckpointError(f"{path}: the file with the experts before its own is missing")
        rank.files.append(path)
        rank.ep = int(match["ep"] or 0) + 1
        if shard_counts.setdefault(key, match["shards"]) != match["shards"]:
            raise CheckpointError(f"{path}: stands beside {rank.files[0].name}: two checkpoints in one folder")
    return matches[0][1]["suffix"], ranks


def _read_rank(folder: Path, suffix: str, rank: Rank) -> None:
    """Fill in the tensors of a rank and check them against its index."""
    index_path = folder / index_name(suffix, rank.variant)
    if index_path.exists():
        tensors, rank.index = read_index(index_path, _FORMATS[suffix])
        named = sorted({ref.path for ref in tensors.values()})
        for file in rank.files:
            if file not in named:
                raise CheckpointError(f"{file}: not in {index_path.name}: left over from another checkpoint?")
        rank.files = named
    elif len(rank.files) > rank.ep or "-of-" in rank.files[0].name:
        raise CheckpointError(f"{index_path}: missing; it says which tensor is in which of the shards")
    else:
        tensors = _FORMATS[suffix].read(rank.files[0])
    joined = with_scales(mxfp4.joined(tensors))
    rank.tensors = {name: ref for name, ref in joined.items() if not _COMPUTED.fullmatch(name)}


def _stack_experts(rank: Rank, layout: Layout, file_format: ModuleType) -> None:
    """Join the experts in the files of the ranks that have divided them; what they all have is read from the first."""
    if rank.ep == 1:
        return
    files = [file_format.read(path) for path in rank.files]
    stacked = [name for name in rank.tensors if layout.place(name).slot.stacked]
    for name in stacked:
        for path, tensors in zip(rank.files, files, strict=True):
            if name not in tensors:
                raise CheckpointError(f"{path}: has no {name!r}, which {rank.files[0].name} has")
    rank.tensors = dict(rank.tensors) | {name: StackedRef(tuple(each[name] for each in files)) for name in stacked}


def read_index(path: Path, file_format: ModuleType) -> tuple[dict[str, TensorRef], dict[str, Any]]:
    """Return ({name: TensorRef}, content) of an index file and the shards it names.

    The shards must hold exactly the tensors that the index names.

    A tensor may be in several shards, as beta's powers are where sharding has split a parameter (split_param): then it
    must be the same to the bit. file_format: the module pdparams or safetensors.
    """
    index = read_json(path)
    names = files_of_index(path, index, file_format.SUFFIX)
    weight_map, tensors = index["weight_map"], dict[str, TensorRef]()
    for name in names:
        file = path.parent / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; {path.name} names it")
        for key, ref in file_format.read(file).items():
            if key in tensors and not same_bytes(tensors[key], ref):
                raise CheckpointError(f"{file}: tensor {key!r} is in {tensors[key].path.name} too, with other values")
            if key not in tensors or weight_map.get(key) == name:
                tensors[key] = ref
    for key, name in weight_map.items():
        if key not in tensors or tensors[key].path.name != name:
            raise CheckpointError(f"{path.parent / name}: has no tensor {key!r}, which {path.name} names")
    for key in sorted(tensors.keys() - weight_map.keys()):
        raise CheckpointError(f"{path}: does not name {key!r}, which is in {tensors[key].path.name}")
    return tensors, index


def _detect(ranks: Mapping[RankKey, Rank], config: dict[str, Any] | None) -> Layout:
    tied = is_tied(config)
    tensors = {name: ref for rank in ranks.values() for name, ref in rank.tensors.items()}
    describe = lambda name: f"{tensors[name].path}: tensor {name!r}"  # noqa: E731
    if config is None:
        return detect(tensors, tied, describe)
    family = family_of(config)
    check_biases(tensors, layouts_of(family, tied), config, describe)
    return detect(tensors, tied, describe, family)


def _degrees(folder: Path, suffix: str, ranks: Mapping[RankKey, Rank]) -> tuple[int, int]:
    """Return the (tp, pp) degrees; every combination of ranks must be there."""
    axes: list[list[int | None]] = []
    for axis in (0, 1):
        known = {rank for key in ranks if (rank := key[axis]) is not None}
        if known and any(key[axis] is None for key in ranks):
            names = ", ".join(sorted(rank.files[0].name for rank in ranks.values()))
            raise CheckpointError(f"{folder}: files of different checkpoints: {names}")
        axes.append([*range(max(known) + 1)] if known else [None])
    tps, pps = axes
    for key in product(tps, pps):
        if key not in ranks:
            raise CheckpointError(
                f"{folder / file_name(suffix, variant(*key))}: missing, though other ranks' files are there"
            )
    return len(tps), len(pps)


def _heads(
    folder: Path, config: dict[str, Any] | None, num_attention_heads: int | None, num_key_value_heads: int | None
) -> tuple[int, int]:
    """Return (num_attention_heads, num_key_value_heads) from config.json, else the arguments."""
    path = folder / "config.json"
    given = {"num_attention_heads": num_attention_heads, "num_key_value_heads": num_key_value_heads}
    if config is None:
        if num_attention_heads is None:
            raise CheckpointError(
                f"{path}: missing; then --num_attention_heads (and --num_key_value_heads) must be given"
            )
        heads, kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
    else:
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        for (key, value), stated in zip(given.items(), (heads, kv_heads), strict=True):
            if value is not None and value != stated:
                raise CheckpointError(f"{path}: {key} is {stated}, but --{key} {value} was given")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(f"{path}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    return heads, kv_heads


def _dims(config: dict[str, Any], heads: tuple[int, int]) -> Dims:
    return Dims(spec_of(config | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}))


def _config_of_tensors(
    folder: Path, heads: int, ranks: Mapping[RankKey, Rank], layout: Layout, tp: int
) -> dict[str, Any]:
    """Return what a config.json would say of the sizes of a checkpoint that has none."""
    shapes, layers = dict[str, Shape](), 0
    for rank in ranks.values():
        for name, ref in rank.tensors.items():
            layer, _, slot = layout.place(name)
            if slot in layout.sparse and slot not in layout.layer:
                raise CheckpointError(f"{folder / 'config.json'}: missing; it says which layers have experts")
            shapes[slot.parts[-1]] = ref.shape[::-1] if slot.transposed else ref.shape
            layers = max(layers, 0 if layer is None else layer + 1)
    learned = ["positions"] if layout.family.learned_positions else []
    for part in ("norm", "embed", "down", *learned):
        if part not in shapes:
            raise CheckpointError(f"{folder}: incomplete: no {part} weight in any file")
    hidden = shapes["norm"][0]
    if hidden % heads:
        path = folder / "config.json"
        raise CheckpointError(f"{path}: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    return {
        "model_type": layout.family.model_type,
        "hidden_size": hidden,
        "intermediate_size": shapes["down"][-1] * tp,
        "num_hidden_layers": layers,
        "vocab_size": shapes["embed"][0] * tp,
        **({"max_position_embeddings": shapes["positions"][0]} if learned else {}),
    }
