"""Where each weight of a model stands in a checkpoint: the one table that all conversions read.

A model has *parts* (q, k, v, o, gate, ...), each a matrix [out, in], a bias [out] or a norm's vector. A layout says
which tensors a checkpoint has and which parts each of them holds, how. To convert is to take the tensors of one layout
apart and to put those of the other together; a new layout is a new table. There are three kinds, each for every family
of models:

- "te": Transformer Engine's decoder layers, weights [out, in], q, k, v stacked on out, gate and up likewise.
- "pd": PaddleNLP's native layers, weights [in, out]; fuse_attention_qkv and fuse_attention_ffn each fuse or not.
  A fused qkv keeps each kv head together with its queries: [q1, q2, k1, v1, q3, q4, k2, v2] (see fuse_param_func in
  paddlenlp/transformers/conversion_utils.py). Its rope turns the same halves of a head as Hugging Face's and ours.
- "hf": Hugging Face transformers, weights [out, in], nothing fused; in GPT-2 [in, out], and q, k, v stacked on out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from paddle_te.configs.families import FAMILIES, LLAMA, Family, family_of, is_tied
from paddle_te.configs.spec import ModelSpec, spec_of
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.weights.names import FUSED, HF, NATIVE, Names
from paddle_te.weights.tensors import CheckpointError, Shape

# The parts and the axis, of [out, in] or [out], that tensor parallelism splits; None: every rank has the whole.
SPLIT_AXIS = {
    "attention_norm": None,
    "attention_norm_bias": None,
    "q": 0,
    "k": 0,
    "v": 0,
    "q_bias": 0,
    "k_bias": 0,
    "v_bias": 0,
    "o": 1,
    "o_bias": None,
    "q_norm": None,
    "k_norm": None,
    "all_q_norm": 0,
    "all_k_norm": 0,
    "attention_post_norm": None,
    "mlp_post_norm": None,
    "mlp_norm": None,
    "mlp_norm_bias": None,
    "gate": 0,
    "up": 0,
    "up_bias": 0,
    "down": 1,
    "down_bias": None,
    "embed": 0,
    "positions": None,
    "norm": None,
    "norm_bias": None,
    "lm_head": 0,
}


Matrix: TypeAlias = Any  # NumPy's array or Paddle's tensor, which have no base in common
Place: TypeAlias = tuple[int | None, "Slot"]  # the layer's number, None outside of the layers


@dataclass(frozen=True)
class Slot:
    """One stored tensor: its name (after the layer's prefix, if it is a layer's) and the parts it holds.

    transposed: it is stored [in, out]. grouped: its rows go by kv head (queries, key, value) instead of part by part.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class Layout:
    """The tensors of a checkpoint. `kind` is te, pd or hf; `title` is for messages."""

    family: Family
    kind: str
    title: str
    prefix: str
    layer: tuple[Slot, ...]
    model: tuple[Slot, ...]
    fuse_attention_qkv: bool = False
    fuse_attention_ffn: bool = False

    @cached_property
    def _slots(self) -> tuple[dict[str, Slot], dict[str, Slot]]:
        return {slot.name: slot for slot in self.layer}, {slot.name: slot for slot in self.model}

    def find(self, name: str) -> Place | None:
        """Return (layer number or None, Slot) of a tensor's name; None for a name that the layout does not have."""
        layer, model = self._slots
        if name in model:
            return None, model[name]
        match = re.fullmatch(re.escape(self.prefix) + r"(0|[1-9]\d*)\.(.+)", name)
        if match and match[2] in layer:
            return int(match[1]), layer[match[2]]
        return None

    def place(self, name: str) -> Place:
        """Return `find` of a name that the layout has, as `detect` has made sure."""
        found = self.find(name)
        assert found is not None
        return found

    @property
    def layer_parts(self) -> list[str]:
        """The parts of a decoder layer."""
        return [part for slot in self.layer for part in slot.parts]

    def model_name(self, part: str) -> str:
        """Return the name of the tensor outside of the layers that holds a part."""
        return next(slot.name for slot in self.model if slot.parts == (part,))

    def full_name(self, layer: int | None, slot: Slot) -> str:
        """Return the name under which a slot is stored."""
        return slot.name if layer is None else f"{self.prefix}{layer}.{slot.name}"

    def tensors(self, num_layers: int) -> list[Place]:
        """Return all (layer number or None, Slot) of a model, in the order in which they are written."""
        embed, *last = [(None, slot) for slot in self.model]
        return [embed, *((layer, slot) for layer in range(num_layers) for slot in self.layer), *last]


_QK_NORMS = {None: (), "head": ("q_norm", "k_norm"), "all": ("all_q_norm", "all_k_norm")}
_QKV, _QKV_BIAS, _GATE_UP = FUSED["qkv"], ("q_bias", "k_bias", "v_bias"), FUSED["gate_up"]


def te_layout(tied: bool = False, family: Family = LLAMA) -> Layout:
    """Return Transformer Engine's layout of a Family. tied: lm_head shares the embedding's shape [vocab, hidden]."""
    native = native_layout(tied=tied, family=family)
    attention, mlp = "transformer.self_attention.", "transformer.layernorm_mlp."
    slots = (
        Slot(f"{attention}layernorm_qkv.ln_weight", ("attention_norm",)),
        Slot(f"{attention}layernorm_qkv.ln_bias", ("attention_norm_bias",)),
        Slot(f"{attention}layernorm_qkv.weight", _QKV),
        Slot(f"{attention}layernorm_qkv.bias", _QKV_BIAS),
        Slot(f"{attention}q_norm.weight", ("q_norm",)),
        Slot(f"{attention}k_norm.weight", ("k_norm",)),
        Slot(f"{attention}q_norm.weight", ("all_q_norm",)),
        Slot(f"{attention}k_norm.weight", ("all_k_norm",)),
        Slot(f"{attention}proj.weight", ("o",)),
        Slot(f"{attention}proj.bias", ("o_bias",)),
        Slot(f"{attention}post_norm.weight", ("attention_post_norm",)),
        Slot(f"{mlp}ln_weight", ("mlp_norm",)),
        Slot(f"{mlp}ln_bias", ("mlp_norm_bias",)),
        Slot(f"{mlp}fc1_weight", _GATE_UP if family.gated else ("up",)),
        Slot(f"{mlp}fc1_bias", ("up_bias",)),
        Slot(f"{mlp}fc2_weight", ("down",)),
        Slot(f"{mlp}fc2_bias", ("down_bias",)),
        Slot(f"{mlp}post_norm.weight", ("mlp_post_norm",)),
    )
    there = native.layer_parts
    layer = tuple(slot for slot in slots if slot.parts[0] in there)
    return Layout(family, "te", "Transformer Engine's", native.prefix, layer, native.model)


def _slots(family: Family, name: str, module: str, transposed: bool = False, grouped: bool = False) -> list[Slot]:
    """Return the weight and, where the family has it, the bias of a module of that name.

    module: a part, or one of FUSED.
    """
    parts = FUSED.get(module, (module,))
    transposed = transposed and not module.endswith("norm")
    slots = [Slot(f"{name}.weight", parts, transposed, grouped)]
    if family.has_bias(parts[0]):
        slots.append(Slot(f"{name}.bias", tuple(f"{part}_bias" for part in parts), grouped=grouped))
    return slots


def _layer(
    family: Family, names: Names, fuse_qkv: bool = False, fuse_ffn: bool = False, grouped: bool = False
) -> tuple[Slot, ...]:
    """Return the Slots of a decoder layer under a Names.

    grouped: q, k and v in one weight lie as PaddleNLP puts them.
    """
    qkv = ("qkv",) if fuse_qkv else _QKV
    mlp = ("up",) if not family.gated else ("gate_up",) if fuse_ffn else _GATE_UP
    before, after = family.norms in ("before", "both"), family.norms in ("after", "both")
    modules = (
        *(("attention_norm",) if before else ()),
        *qkv,
        *_QK_NORMS[family.qk_norm],
        "o",
        *(("attention_post_norm",) if after else ()),
        *(("mlp_norm",) if before else ()),
        *mlp,
        "down",
        *(("mlp_post_norm",) if after else ()),
    )
    slots = [
        _slots(family, names.layer[module], module, names.transposed, grouped and module == "qkv") for module in modules
    ]
    return tuple(chain.from_iterable(slots))


def _model(family: Family, names: Names, base: str, head_transposed: bool = False) -> tuple[Slot, ...]:
    """Return the Slots of what is outside of the layers. base: the text before all names but the head's."""
    return (
        Slot(f"{base}{names.embed}.weight", ("embed",)),
        *([Slot(f"{base}{names.positions}.weight", ("positions",))] if family.learned_positions else ()),
        *_slots(family, f"{base}{names.norm}", "norm"),
        Slot("lm_head.weight", ("lm_head",), transposed=head_transposed),
    )


def native_layout(
    fuse_attention_qkv: bool = False, fuse_attention_ffn: bool = False, tied: bool = False, family: Family = LLAMA
) -> Layout:
    """Return PaddleNLP's own layout of a Family, fused as its config's flags of the same names say."""
    fused = [text for text, on in [("fused qkv", fuse_attention_qkv), ("fused gate_up", fuse_attention_ffn)] if on]
    names, base = NATIVE.get(family.names, NATIVE["llama"]), f"{family.model_type}."
    return Layout(
        family,
        "pd",
        "PaddleNLP's native" + (f" ({', '.join(fused)})" if fused else ""),
        f"{base}{names.layers}.",
        _layer(family, names, fuse_attention_qkv, fuse_attention_ffn, grouped=True),
        _model(family, names, base, head_transposed=not (tied or family.tied)),
        fuse_attention_qkv,
        fuse_attention_ffn,
    )


def hf_layout(tied: bool = False, family: Family = LLAMA) -> Layout:
    """Return Hugging Face's layout of a Family. tied: without lm_head, which is the embedding."""
    names, base = HF[family.names], HF[family.names].base or ""
    layer = _layer(family, names, "qkv" in names.layer, "gate_up" in names.layer)
    outside = tuple(slot for slot in _model(family, names, base) if not (tied and slot.parts == ("lm_head",)))
    return Layout(family, "hf", "Hugging Face's", f"{base}{names.layers}.", layer, outside)


def layouts_of(family: Family, tied: bool = False) -> list[Layout]:
    """Return all layouts of a Family: PaddleNLP's own where it has a class of it."""
    fused = [(qkv, ffn) for qkv in (False, True) for ffn in (False, True)] if family.model_type in PADDLENLP else []
    native = [native_layout(*flags, tied, family) for flags in fused]
    return [te_layout(tied, family), *native, hf_layout(family=family)]


def detect(
    names: Collection[str],
    tied: bool = False,
    describe: Callable[[str], str] = lambda name: f"tensor {name!r}",
    family: Family | None = None,
) -> Layout:
    """Return the Layout that has all of `names`; `describe` makes a name's text in an error message.

    family: the model's; None: any, the first whose names they are. Raises CheckpointError when a name is in no layout
    (another model's checkpoint) or names of different layouts are mixed.
    """
    families = [family] if family else FAMILIES.values()
    everything = [layout for family in families for layout in layouts_of(family, tied)]
    unknown = [name for name in names if not any(layout.find(name) for layout in everything)]
    if unknown:
        models = " or ".join(family.title for family in families)
        raise CheckpointError(f"{_list_unknown(unknown, everything, describe)}: not a {models} checkpoint")
    candidates, telling = everything, None
    for name in names:
        kept = [layout for layout in candidates if layout.find(name)]
        if not kept:
            raise CheckpointError(f"{describe(name)}: mixed layouts: it does not belong together with {telling!r}")
        if len(kept) < len(candidates):
            telling = name
        candidates = kept
    return candidates[0]


def _list_unknown(
    names: Sequence[str], known_layouts: Sequence[Layout], describe: Callable[[str], str], most: int = 5
) -> str:
    """List names that no layout has, `most` of them each with the name that it may have been meant for."""
    lines = []
    for name in names[:most]:
        number = re.search(r"\.(\d+)\.", name)
        layer = int(number[1]) if number else 0
        known = {
            layout.full_name(n if n is None else layer, slot)
            for layout in known_layouts
            for n, slot in layout.tensors(1)
        }
        meant = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
        lines.append(f"{describe(name)} is in none of the known layouts" + "".join(f" (perhaps {m!r}?)" for m in meant))
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return "; ".join(lines + more)


@dataclass(frozen=True)
class Dims:
    """The shapes of a model's weights, and how ranks share them, from its ModelSpec."""

    spec: ModelSpec

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return len(self.spec.layers)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.spec.layer.attention.head_dim

    @property
    def queries(self) -> int:
        """Query heads to each key-value head."""
        return self.spec.layer.attention.queries

    def said(self, key: str) -> int:
        """Return the value of a key of config.json that shapes weights."""
        return self._sizes[key]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        attention = self.spec.layer.attention
        return {
            "hidden_size": self.spec.hidden,
            "intermediate_size": self.spec.layer.feed_forward.ffn,
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.groups,
            "head_dim": attention.head_dim,
            "vocab_size": self.spec.vocabulary,
            "max_position_embeddings": self.spec.positions,
        }

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        """{part: its whole shape} of parts that are no [hidden] of a norm or a bias."""
        attention = self.spec.layer.attention
        h, f, v = self.spec.hidden, self.spec.layer.feed_forward.ffn, self.spec.vocabulary
        q, kv = attention.q_size, attention.kv_size
        return {
            "q": (q, h),
            "k": (kv, h),
            "v": (kv, h),
            "q_bias": (q,),
            "k_bias": (kv,),
            "v_bias": (kv,),
            "all_q_norm": (q,),
            "all_k_norm": (kv,),
            "q_norm": (attention.head_dim,),
            "k_norm": (attention.head_dim,),
            "o": (h, q),
            "gate": (f, h),
            "up": (f, h),
            "up_bias": (f,),
            "down": (h, f),
            "embed": (v, h),
            "positions": (self.spec.positions, h),
            "lm_head": (v, h),
        }

    def part_shape(self, part: str, degree: int = 1) -> Shape:
        """Return the shape of one rank's share of a part, [out, in] (a bias: [out], a norm: [hidden]).

        As in PaddleNLP, what `degree` does not divide is not split: key and value when there are fewer kv heads,
        embedding and lm_head when the vocabulary is odd. Raises CheckpointError when q, o or the MLP cannot be split.
        """
        shape, axis = [*self._shapes.get(part, (self.spec.hidden,))], SPLIT_AXIS[part]
        if axis is not None and self.splits(part, degree):
            shape[axis] //= degree
        return tuple(shape)

    def share(self, part: str, degree: int, rank: int) -> tuple[slice, ...]:
        """Return the slices, one for each axis, that are a rank's share of a part."""
        slices, axis = [slice(None)] * len(self.part_shape(part)), SPLIT_AXIS[part]
        if axis is not None and self.splits(part, degree):
            width = self.part_shape(part, degree)[axis]
            slices[axis] = slice(rank * width, (rank + 1) * width)
        return tuple(slices)

    def splits(self, part: str, degree: int) -> bool:
        """Return whether tensor parallelism of that degree splits the part."""
        if SPLIT_AXIS[part] is None or degree == 1:
            return False
        what, must = {
            "q": ("num_attention_heads", True),
            "o": ("num_attention_heads", True),
            "k": ("num_key_value_heads", False),
            "v": ("num_key_value_heads", False),
            "all_q_norm": ("num_attention_heads", True),
            "all_k_norm": ("num_key_value_heads", False),
            "embed": ("vocab_size", False),
            "lm_head": ("vocab_size", False),
        }.get(part.removesuffix("_bias"), ("intermediate_size", True))
        size = self.said(what)
        if must and size % degree:
            raise CheckpointError(f"{what}={size} cannot be divided by tensor_parallel_degree={degree}")
        return size % degree == 0

    def slot_shape(self, slot: Slot, degree: int = 1) -> Shape:
        """Return the shape of one rank's stored tensor."""
        first, *others = [self.part_shape(part, degree) for part in slot.parts]
        if not others:
            return first[::-1] if slot.transposed else first
        if slot.parts in (_QKV, _QKV_BIAS) and degree > 1 and not self.splits("k", degree):
            heads = self.said("num_key_value_heads")
            raise CheckpointError(
                f"num_key_value_heads={heads} cannot be divided by tensor_parallel_degree={degree}, which "
                f"{slot.name} with q, k and v in one tensor needs"
            )
        shape = (first[0] + sum(other[0] for other in others), *first[1:])
        return shape[::-1] if slot.transposed else shape


def take_apart(slot: Slot, tensor: Matrix, queries: int, head_dim: int) -> dict[str, Matrix]:
    """Return {part: [out, in] or [out]} of a stored tensor, whole or one rank's; views where possible.

    tensor: numpy array or Paddle tensor. queries: heads to each key-value head. head_dim: the width of one.
    """
    if slot.transposed:
        tensor = tensor.T
    if len(slot.parts) == 1:
        return {slot.parts[0]: tensor}
    rows = tensor.shape[0]
    if slot.grouped:
        step, stops = (queries + 2) * head_dim, [n * head_dim for n in (0, queries, queries + 1, queries + 2)]
        groups = range(0, rows, step)
        return {
            part: concat([tensor[group + start : group + stop] for group in groups], 0)
            for part, start, stop in zip(slot.parts, stops[:-1], stops[1:], strict=True)
        }
    shares = (queries, 1, 1) if len(slot.parts) == 3 else (1, 1)
    unit = rows // sum(shares)
    stops = [unit * sum(shares[: i + 1]) for i in range(len(shares))]
    return {p: tensor[stop - unit * n : stop] for p, stop, n in zip(slot.parts, stops, shares, strict=True)}


def put_together(slot: Slot, parts: Mapping[str, Matrix], head_dim: int) -> Matrix:
    """Return the stored tensor of a slot from {part: [out, in] or [out]}; the inverse of `take_apart`."""
    tensor = concat(stack(slot, parts, head_dim), 0)
    return tensor.T if slot.transposed else tensor


def stack(slot: Slot, parts: Mapping[str, Matrix], head_dim: int) -> list[Matrix]:
    """Return the tensors whose rows, one tensor's after the other's, are a slot's before its transposition."""
    tensors = [parts[part] for part in slot.parts]
    if not slot.grouped:
        return tensors
    groups = tensors[1].shape[0] // head_dim
    rows = [tensor.shape[0] // groups for tensor in tensors]
    return [t[n * g : n * (g + 1)] for g in range(groups) for t, n in zip(tensors, rows, strict=True)]


def concat(tensors: Sequence[Matrix], axis: int) -> Matrix:
    """Return numpy arrays or Paddle tensors, one after the other; a single one as it is."""
    if len(tensors) == 1:
        return tensors[0]
    if isinstance(tensors[0], np.ndarray):
        return np.concatenate(tensors, axis)
    import paddle

    return paddle.concat(tensors, axis)


def native_to_te(state_dict: Mapping[str, Matrix], config: Any) -> dict[str, Matrix]:
    """Convert PaddleNLP's native weights, fused or not, to Transformer Engine's.

    Args:
        state_dict: {name: numpy array or Paddle tensor}, whole weights or one tensor parallel rank's.
        config: has model_type (left out: Llama's), hidden_size, num_attention_heads, num_key_value_heads and
            tie_word_embeddings; PaddleNLP's object or a dict.

    Returns: a new dict; tensors may be views of the old ones. Raises CheckpointError for a dict of another layout,
    an incomplete layer, or q and k whose sizes contradict the heads.
    """
    return _convert(state_dict, config, "pd", te_layout(is_tied(config), family_of(config)))


def te_to_native(
    state_dict: Mapping[str, Matrix], config: Any, fuse_attention_qkv: bool = False, fuse_attention_ffn: bool = False
) -> dict[str, Matrix]:
    """Convert Transformer Engine's weights to PaddleNLP's native ones, fused as asked for; else as `native_to_te`."""
    tied = is_tied(config)
    target = native_layout(fuse_attention_qkv, fuse_attention_ffn, tied, family_of(config))
    return _convert(state_dict, config, "te", target)


def _convert(state_dict: Mapping[str, Matrix], config: Any, kind: str, target: Layout) -> dict[str, Matrix]:
    source = detect(state_dict, is_tied(config), family=target.family)
    if source.kind != kind:
        raise CheckpointError(f"expected another layout: the weights are in {source.title} layout")
    attention = spec_of(config).layer.attention
    parts: dict[int | None, dict[str, Matrix]] = {}
    for name, tensor in state_dict.items():
        layer, slot = source.place(name)
        parts.setdefault(layer, {}).update(take_apart(slot, tensor, attention.queries, attention.head_dim))
    for layer, found in parts.items():
        if layer is not None:
            _check_layer(layer, found, source.layer_parts, attention.queries)
    converted = {}
    for layer, found in parts.items():
        for slot in target.model if layer is None else target.layer:
            if all(part in found for part in slot.parts):
                converted[target.full_name(layer, slot)] = put_together(slot, found, attention.head_dim)
    return converted


def _check_layer(layer: int, parts: Mapping[str, Matrix], wanted: Iterable[str], queries: int) -> None:
    missing = [part for part in wanted if part not in parts]
    if missing:
        raise CheckpointError(f"layer {layer} has no {', '.join(missing)}")
    q, k = parts["q"].shape[0], parts["k"].shape[0]
    if q != queries * k:
        raise CheckpointError(
            f"layer {layer}: q has {q} rows and k {k}, which contradicts {queries} query heads to each kv head"
        )
