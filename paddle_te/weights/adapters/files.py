"""Open an adapter's folder: which tensors it has, and beside which weights. Reads no tensor before it is needed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from paddle_te.configs.families import Family
from paddle_te.configs.spec import ModelSpec
from paddle_te.folders import PADDLE_ADAPTER, PADDLE_ADAPTER_WEIGHTS, PEFT_ADAPTER, files_of
from paddle_te.weights import pdparams, safetensors
from paddle_te.weights.adapters.names import Form, form_of
from paddle_te.weights.adapters.settings import Settings, read_settings
from paddle_te.weights.contents import COMPANIONS, check_contents
from paddle_te.weights.dims import Dims, concat
from paddle_te.weights.folder import dims_of, read_index
from paddle_te.weights.layout import EXPERT, SPLIT_AXIS, Part, Place
from paddle_te.weights.tensors import Array, CheckpointError, Shape, TensorRef

Tensors: TypeAlias = dict[str, tuple[TensorRef, ...]]  # {name: tensors of the ranks in order}

PEFT_WEIGHTS = "adapter_model.safetensors"
_ONE_FILE = {"lora_model_state.pdparams": pdparams, "peft_model.safetensors": safetensors}
_OF_A_RANK = re.compile(r"lora_model_state\.(?:tp\d{2,}|(?:tp\d{2,}_)?pp\d{2,})\.pdparams")
_MARKS = {kind: re.compile(rf"[._]({kind}\d{{2,}})(?=[._])") for kind in ("tp", "pp")}


@dataclass(frozen=True)
class LowRank:
    """A and B beside one module, whose weight W with them is W + scaling · B · A.

    name: of the module. place: its Place. a, b: TensorRefs in order, one, or that of each rank which has a share.
    transposed: they are stored [in, r] and [r, out].
    """

    name: str
    place: Place
    a: tuple[TensorRef, ...]
    b: tuple[TensorRef, ...]
    transposed: bool
    scaling: float

    @property
    def rank(self) -> int:
        """r."""
        return self._shape(self.a)[0]

    @property
    def in_features(self) -> int:
        """Columns of A."""
        return sum(self._shape((ref,))[1] for ref in self.a)

    @property
    def out_features(self) -> int:
        """Rows of B."""
        return sum(self._shape((ref,))[0] for ref in self.b)

    @property
    def dtype(self) -> str:
        """The dtype of A and B, as they are stored."""
        return self.a[0].dtype

    def _shape(self, refs: tuple[TensorRef, ...]) -> Shape:
        return refs[0].shape[::-1] if self.transposed else refs[0].shape

    def _read(self, ref: TensorRef) -> Array:
        return ref.read().T if self.transposed else ref.read()

    def read_a(self) -> Array:
        """Return A [r, in], in its own dtype."""
        return concat([self._read(ref) for ref in self.a], 1)

    def read_b(self, part: Part, dims: Dims) -> Array:
        """Return those rows of B [out, r] that are a Part's."""
        shares = [dims.take_apart(self.place, self._read(ref))[part] for ref in self.b]
        return np.ascontiguousarray(concat(shares, 0))


class Whole(NamedTuple):
    """A weight or bias that an adapter replaces, the Place that it fills, and its name in the adapter."""

    ref: TensorRef
    place: Place
    name: str


@dataclass(frozen=True)
class Adapter:
    """An opened adapter.

    parts: {Part: LowRank}. whole: {Part: Whole} of weights and biases that it replaces. tensors: {name: TensorRefs}.
    companions: files to go along with it.
    """

    folder: Path
    form: Form
    settings: Settings
    parts: dict[Part, LowRank]
    whole: dict[Part, Whole]
    tensors: Tensors = field(repr=False)
    companions: list[str] = field()

    @property
    def title(self) -> str:
        """The adapter in words, for messages."""
        few = self.settings
        scaled = "alpha / sqrt(rank)" if few.rslora else "alpha / rank"
        return f"a LoRA adapter in {self.form.title} names, rank {few.rank}, scaled by {scaled} = {few.scaling:g}"

    def low_ranks(self) -> dict[int | None, list[LowRank]]:
        """Return {layer: its LowRanks}, each once."""
        found: dict[int | None, list[LowRank]] = {}
        for part, low_rank in self.parts.items():
            if low_rank not in found.setdefault(part.layer, []):
                found[part.layer].append(low_rank)
        return found

    def touches(self, parts: Iterable[Part]) -> bool:
        """Return whether it changes one of some Parts."""
        return any(part in self.parts or part in self.whole for part in parts)


def open_adapter(folder: str | Path, family: Family | None = None) -> Adapter:
    """Open the adapter in a folder: PEFT's, PaddleNLP's with any backend and in any degrees, or PaddleFormers'.

    family: the Family of the model that it is for; None: as its names say. Raises CheckpointError, naming the file, for
    what is missing, damaged, would run code when it is loaded, or is not understood.
    """
    folder = Path(folder)
    names = [name for name in (PEFT_ADAPTER, PADDLE_ADAPTER) if (folder / name).is_file()]
    if len(names) != 1:
        found = " and ".join(names) if names else f"neither {PEFT_ADAPTER} nor {PADDLE_ADAPTER}"
        raise CheckpointError(f"{folder}: has {found}: it holds {'two adapters' if names else 'no LoRA adapter'}")
    peft = names == [PEFT_ADAPTER]
    settings, tensors = read_settings(folder), _peft_tensors(folder) if peft else _paddle_tensors(folder)
    if not tensors:
        raise CheckpointError(f"{folder}: its files hold no tensor")
    form = form_of(folder, tensors, peft, family)
    companions = sorted(path.name for path in folder.iterdir() if COMPANIONS.fullmatch(path.name) and path.is_file())
    parts = _low_ranks(folder, form, settings, tensors)
    return Adapter(folder, form, settings, parts, _whole(form, tensors), tensors, companions)


def _peft_tensors(folder: Path) -> Tensors:
    path = folder / PEFT_WEIGHTS
    if path.is_file():
        return {name: (ref,) for name, ref in safetensors.read(path).items()}
    if (folder / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{folder / 'adapter_model.bin'}: is a pickle, which may run code and is not read: load it with PEFT, and "
            f"save_pretrained(..., safe_serialization=True) writes {PEFT_WEIGHTS}"
        )
    raise CheckpointError(f"{path}: missing; {PEFT_ADAPTER} is there")


def _paddle_tensors(folder: Path) -> Tensors:
    """Return the tensors of the one form of PaddleNLP's and PaddleFormers' files that is there."""
    found = files_of(folder, PADDLE_ADAPTER_WEIGHTS)
    for path in found:
        check_contents(path)
    names, tensors = {path.name for path in found}, []
    for module in (safetensors, pdparams):
        index = f"peft_model{module.SUFFIX}.index.json"
        if index in names:
            tensors.append(_single(read_index(folder / index, module)[0]))
    for name, module in _ONE_FILE.items():
        if name in names:
            tensors.append(_single(module.read(folder / name)))
    if of_ranks := [name for name in names if _OF_A_RANK.fullmatch(name)]:
        tensors.append(_of_stages(folder, of_ranks))
    if len(tensors) != 1:
        what = f"the weights of several adapters: {', '.join(sorted(names))}" if tensors else "no weights of an adapter"
        raise CheckpointError(f"{folder}: has {PADDLE_ADAPTER}, and {what}")
    return tensors[0]


def _single(tensors: dict[str, TensorRef]) -> Tensors:
    return {name: (ref,) for name, ref in tensors.items()}


def _of_stages(folder: Path, names: Collection[str]) -> Tensors:
    """Return the tensors in the files of tensor parallel ranks and of a pipeline's stages, one kind or both."""
    ranks, stages = (sorted({mark for name in names for mark in _MARKS[kind].findall(name)}) for kind in ("tp", "pp"))
    found: Tensors = {}
    for stage in _counted(stages):
        of_stage = _of_ranks(folder, ["_".join(filter(None, (rank, stage))) for rank in _counted(ranks)])
        if both := sorted(found.keys() & of_stage.keys()):
            raise CheckpointError(f"{folder}: {both[0]!r} is in the files of two stages of a pipeline")
        found |= of_stage
    return found


def _counted(marks: Sequence[str]) -> Sequence[str]:
    """Return ["tp00", "tp01", …] up to the last of the marks; [""] where there are none."""
    return [f"{marks[-1][:2]}{number:02d}" for number in range(int(marks[-1][2:]) + 1)] if marks else [""]


def _of_ranks(folder: Path, variants: Sequence[str]) -> Tensors:
    """Return the tensors of ranks that share them; variants: of their files' names."""
    shares: list[dict[str, TensorRef]] = []
    for variant in variants:
        path = folder / f"lora_model_state.{variant}.pdparams"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though other ranks' files are there")
        shares.append(pdparams.read(path))
        if shares[-1].keys() != shares[0].keys():
            raise CheckpointError(f"{path}: has other tensors than the files of the other ranks")
    return {name: tuple(share[name] for share in shares) for name in shares[0]}


def _parts(place: Place) -> list[Part]:
    """Return the Parts of a module or a weight, of one expert if of any."""
    return [Part(place.layer, place.expert, name) for name in place.slot.parts]


def _low_ranks(folder: Path, form: Form, settings: Settings, tensors: Tensors) -> dict[Part, LowRank]:
    """Return {Part: LowRank}."""
    factors: dict[Place, dict[str, str]] = {}
    for name in tensors:
        found = form.name_of(name)
        if found.factor:
            factors.setdefault(found.place, {})[found.factor] = name
    parts: dict[Part, LowRank] = {}
    for place, names in factors.items():
        for factor, other in ("AB", "BA"):
            if factor not in names:
                raise CheckpointError(f"{folder}: {names[other]!r} has no {factor} beside it")
        a, b = ((names[f], tensors[names[f]]) for f in "AB")
        for one, of_a, of_b in _of_experts(place, a, b) if place.slot.stacked else [(place, a, b)]:
            parts |= dict.fromkeys(_parts(one), _low_rank(form, settings, one, of_a, of_b))
    return parts


Named: TypeAlias = tuple[str, tuple[TensorRef, ...]]  # a tensor's name, and what the ranks have of it


def _of_experts(place: Place, a: Named, b: Named) -> Iterator[tuple[Place, Named, Named]]:
    """Yield the Place of each expert of a module that has the A and B of all, and its own A and B."""
    base, _, module = place.slot.name.rpartition(".")
    slot = replace(place.slot, name=f"{base}.{EXPERT}.{module}")
    for name, refs in (a, b):
        if len(refs) != 1 or len(refs[0].shape) != 3:
            shapes = " and ".join(str(list(ref.shape)) for ref in refs)
            raise CheckpointError(f"{refs[0].path}: {name!r} has shape {shapes}, which is not a matrix of each expert")
    counts = [refs[0].shape[0] for _, refs in (a, b)]
    if counts[0] != counts[1]:
        raise CheckpointError(f"{a[1][0].path}: {a[0]!r} has {counts[0]} experts, {b[0]!r} {counts[1]}")
    for expert in range(counts[0]):
        own_a, own_b = ((name, (refs[0].item(expert),)) for name, refs in (a, b))
        yield Place(place.layer, expert, slot), own_a, own_b


def _low_rank(
    form: Form,
    settings: Settings,
    place: Place,
    a: Named,
    b: Named,
) -> LowRank:
    module = form.modules.full_name(place)
    for name, refs in (a, b):
        for ref in refs:
            if len(ref.shape) != 2:
                raise CheckpointError(f"{ref.path}: {name!r} has shape {list(ref.shape)}, which is no matrix")
    embedding = place.slot.parts == ("embed",)
    (a_name, a_refs), (b_name, b_refs) = (a, b)
    a_refs, b_refs = (_shares(refs, place, axis) for refs, axis in ((a_refs, 1), (b_refs, 0)))
    if embedding:  # its A and B are those of the transposed weight
        a_refs, b_refs = b_refs, a_refs
    transposed = embedding or form.transposed and place.expert is None
    low_rank = LowRank(module, place, a_refs, b_refs, transposed, settings.scaling_of(module))
    wanted, of_a = settings.rank_of(module), int(low_rank.transposed)
    found = {ref.shape[of_a] for ref in a_refs} | {ref.shape[1 - of_a] for ref in b_refs}
    if found != {wanted}:
        raise CheckpointError(
            f"{a_refs[0].path}: {a_name!r} and {b_name!r} have rank {' and '.join(map(str, sorted(found)))}, but "
            f"{settings.path.name} says {wanted}"
        )
    return low_rank


def _shares(refs: tuple[TensorRef, ...], place: Place, axis: int) -> tuple[TensorRef, ...]:
    """Return those of the ranks' tensors that follow one another on an axis: all where the ranks share it.

    axis: 0 for B, 1 for A.
    """
    if len(refs) == 1 or SPLIT_AXIS[place.slot.parts[0]] != axis:
        return refs[:1]
    dims = dims_of(refs[0].path.parent)
    split = [dims.splits(part, len(refs)) for part in _parts(place)]
    return refs if all(split) else refs[:1]


def _whole(form: Form, tensors: Tensors) -> dict[Part, Whole]:
    found: dict[Part, Whole] = {}
    for name, refs in tensors.items():
        place, factor = form.name_of(name)
        if factor is None:
            if len(refs) > 1:
                raise CheckpointError(f"{refs[0].path}: {name!r}: a whole weight in files of several ranks is not read")
            found |= dict.fromkeys(_parts(place), Whole(refs[0], place, name))
    return found


def all_parts(form: Form, model: ModelSpec) -> Iterator[tuple[str, Place]]:
    """Yield (module's full name, Place) of a model's decoder layers and, in PEFT's form, of what is outside."""
    for place in form.modules.tensors(model):
        yield form.modules.full_name(place), place
