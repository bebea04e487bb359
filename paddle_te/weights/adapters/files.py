"""An adapter's folder: which tensors it has, and what they stand beside. No tensor is read before it is asked for."""

import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from paddle_te.weights import layout as layouts
from paddle_te.weights import pdparams, safetensors
from paddle_te.weights.adapters.names import Form, form_of
from paddle_te.weights.adapters.settings import Settings, read_settings
from paddle_te.weights.contents import (
    COMPANIONS,
    PADDLE_ADAPTER,
    PADDLE_ADAPTER_FILES,
    PEFT_ADAPTER,
    check_contents,
)
from paddle_te.weights.folder import dims_of, read_index
from paddle_te.weights.layout import SPLIT_AXIS, Slot
from paddle_te.weights.tensors import CheckpointError

PEFT_WEIGHTS = "adapter_model.safetensors"
_ONE_FILE = {"lora_model_state.pdparams": pdparams, "peft_model.safetensors": safetensors}
_OF_A_RANK = re.compile(r"lora_model_state\.tp(\d{2,})\.pdparams")


@dataclass(frozen=True)
class LowRank:
    """A and B beside one module, whose weight W with them is W + scaling · B · A.

    name: of the module. a, b: TensorRefs in order, one, or that of each rank which has a share. transposed: they are
    stored [in, r] and [r, out].
    """

    name: str
    slot: Slot
    a: tuple
    b: tuple
    transposed: bool
    scaling: float

    @property
    def rank(self):
        """r."""
        return self._shape(self.a)[0]

    @property
    def in_features(self):
        """Columns of A."""
        return sum(self._shape((ref,))[1] for ref in self.a)

    @property
    def out_features(self):
        """Rows of B."""
        return sum(self._shape((ref,))[0] for ref in self.b)

    @property
    def dtype(self):
        """Of A and B, as they are stored."""
        return self.a[0].dtype

    def _shape(self, refs):
        return refs[0].shape[::-1] if self.transposed else refs[0].shape

    def _read(self, ref):
        return ref.read().T if self.transposed else ref.read()

    def read_a(self):
        """A [r, in], in its own dtype."""
        return layouts.concat([self._read(ref) for ref in self.a], 1)

    def read_b(self, part, dims):
        """Those rows of B [out, r] that are a part's."""
        shares = [layouts.take_apart(self.slot, self._read(ref), dims.queries, dims.head_dim)[part] for ref in self.b]
        return np.ascontiguousarray(layouts.concat(shares, 0))


@dataclass(frozen=True)
class Adapter:
    """An opened adapter.

    parts: {(layer, part): LowRank}. whole: {(layer, part): (TensorRef, Slot, name)} of weights and biases that it
    replaces. tensors: {name: TensorRefs}. companions: files to go along with it.
    """

    folder: Path
    form: Form
    settings: Settings
    parts: dict
    whole: dict
    tensors: dict = field(repr=False)
    companions: list

    @property
    def title(self):
        """What it is, for messages."""
        few = self.settings
        scaled = "alpha / sqrt(rank)" if few.rslora else "alpha / rank"
        return f"a LoRA adapter in {self.form.title} names, rank {few.rank}, scaled by {scaled} = {few.scaling:g}"

    def low_ranks(self):
        """{layer: its LowRanks}, each once."""
        found = {}
        for (layer, _), low_rank in self.parts.items():
            if low_rank not in found.setdefault(layer, []):
                found[layer].append(low_rank)
        return found

    def touches(self, layer, parts):
        """Whether it changes one of a layer's parts."""
        return any((layer, part) in self.parts or (layer, part) in self.whole for part in parts)


def open_adapter(folder, family=None) -> Adapter:
    """The adapter in a folder: PEFT's, PaddleNLP's with any backend and in any degrees, or PaddleFormers'.

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


def _peft_tensors(folder):
    path = folder / PEFT_WEIGHTS
    if path.is_file():
        return {name: (ref,) for name, ref in safetensors.read(path).items()}
    if (folder / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{folder / 'adapter_model.bin'}: is a pickle, which may run code and is not read: load it with PEFT, and "
            f"save_pretrained(..., safe_serialization=True) writes {PEFT_WEIGHTS}"
        )
    raise CheckpointError(f"{path}: missing; {PEFT_ADAPTER} is there")


def _paddle_tensors(folder):
    """{name: TensorRefs of the ranks in order}."""
    found = [path for pattern in PADDLE_ADAPTER_FILES for path in sorted(folder.glob(pattern))]
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
    if ranks := sorted(int(match[1]) for name in names if (match := _OF_A_RANK.fullmatch(name))):
        tensors.append(_of_ranks(folder, ranks))
    if len(tensors) != 1:
        what = f"the weights of several adapters: {', '.join(sorted(names))}" if tensors else "no weights of an adapter"
        raise CheckpointError(f"{folder}: has {PADDLE_ADAPTER}, and {what}")
    return tensors[0]


def _single(tensors):
    return {name: (ref,) for name, ref in tensors.items()}


def _of_ranks(folder, ranks):
    shares = []
    for rank in range(ranks[-1] + 1):
        path = folder / f"lora_model_state.tp{rank:02d}.pdparams"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though other ranks' files are there")
        shares.append(pdparams.read(path))
        if shares[-1].keys() != shares[0].keys():
            raise CheckpointError(f"{path}: has other tensors than the files of the other ranks")
    return {name: tuple(share[name] for share in shares) for name in shares[0]}


def _low_ranks(folder, form, settings, tensors):
    """{(layer, part): LowRank}."""
    factors = {}
    for name in tensors:
        found = form.find(name)
        if found.factor:
            factors.setdefault((found.layer, found.slot), {})[found.factor] = name
    parts = {}
    for (layer, slot), names in factors.items():
        for factor, other in ("AB", "BA"):
            if factor not in names:
                raise CheckpointError(f"{folder}: {names[other]!r} has no {factor} beside it")
        low_rank = _low_rank(form, settings, layer, slot, *((names[f], tensors[names[f]]) for f in "AB"))
        parts |= {(layer, part): low_rank for part in slot.parts}
    return parts


def _low_rank(form, settings, layer, slot, a, b):
    module = form.modules.full_name(layer, slot)
    for name, refs in (a, b):
        for ref in refs:
            if len(ref.shape) != 2:
                raise CheckpointError(f"{ref.path}: {name!r} has shape {list(ref.shape)}, which is no matrix")
    embedding = slot.parts == ("embed",)
    (a_name, a_refs), (b_name, b_refs) = (a, b)
    a_refs, b_refs = (_shares(refs, slot, axis) for refs, axis in ((a_refs, 1), (b_refs, 0)))
    if embedding:  # its A and B are those of the transposed weight
        a_refs, b_refs = b_refs, a_refs
    low_rank = LowRank(module, slot, a_refs, b_refs, form.transposed or embedding, settings.scaling_of(module))
    wanted, of_a = settings.rank_of(module), int(low_rank.transposed)
    found = {ref.shape[of_a] for ref in a_refs} | {ref.shape[1 - of_a] for ref in b_refs}
    if found != {wanted}:
        raise CheckpointError(
            f"{a_refs[0].path}: {a_name!r} and {b_name!r} have rank {' and '.join(map(str, sorted(found)))}, but "
            f"{settings.path.name} says {wanted}"
        )
    return low_rank


def _shares(refs, slot, axis):
    """Those of the ranks' tensors that follow one another: all where ranks share the axis, 0 for B and 1 for A."""
    if len(refs) == 1 or SPLIT_AXIS[slot.parts[0]] != axis:
        return refs[:1]
    dims = dims_of(refs[0].path.parent)
    split = [dims.splits(part, len(refs)) for part in slot.parts]
    return refs if all(split) else refs[:1]


def _whole(form, tensors):
    found = {}
    for name, refs in tensors.items():
        place = form.find(name)
        if place.factor is None:
            if len(refs) > 1:
                raise CheckpointError(f"{refs[0].path}: {name!r}: a whole weight in files of several ranks is not read")
            found |= {(place.layer, part): (refs[0], place.slot, name) for part in place.slot.parts}
    return found


def all_parts(form, num_layers):
    """All (layer, module's full name, Slot) of a model's decoder layers and, in PEFT's, of what is outside of them."""
    inside = product(range(num_layers), form.modules.layer)
    for layer, slot in (*inside, *((None, slot) for slot in form.modules.model)):
        yield layer, form.modules.full_name(layer, slot), slot
