"""Where each weight of a model stands in a checkpoint: the one table that all conversions read.

A model has *parts* (q, k, v, o, gate, ...), each a matrix [out, in], a bias [out] or a norm's vector, and each in a
layer, of an expert or of none. A layout says which tensors a checkpoint has and which parts each of them holds, how. To
convert is to take the tensors of one layout apart and to put those of the other together; a new layout is a new table.
There are three kinds, each for every family of models:

- "te": Transformer Engine's decoder layers, weights [out, in], q, k, v stacked on out, gate and up likewise. One tensor
  [experts, out, in] has the weights of all experts of a layer.
- "pd": PaddleNLP's native layers, weights [in, out]; fuse_attention_qkv and fuse_attention_ffn each fuse or not.
  A fused qkv keeps each kv head together with its queries: [q1, q2, k1, v1, q3, q4, k2, v2] (see fuse_param_func in
  paddlenlp/transformers/conversion_utils.py). Its rope turns the same halves of a head as Hugging Face's and ours.
- "hf": Hugging Face transformers, weights [out, in], nothing fused; in GPT-2 [in, out], and q, k, v stacked on out.
  Each expert has tensors of its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from paddle_te.configs.families import FAMILIES, LLAMA, Family, family_of, is_tied
from paddle_te.configs.spec import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, experts_width, spec_of
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.weights.names import FUSED, HF, NATIVE, Names
from paddle_te.weights.tensors import CheckpointError, Shape

# The parts and the axis, of [out, in] or [out], that tensor parallelism splits; None: every rank has the whole. Experts
# are not split: each rank has some of them whole.
SPLIT_AXIS = {
    "attention_norm": None,
    "attention_norm_bias": None,
    "q": 0,
    "k": 0,
    "v": 0,
    "q_bias": 0,
    "k_bias": 0,
    "v_bias": 0,
    "q_a": None,
    "q_a_norm": None,
    "q_b": 0,
    "kv_a": None,
    "kv_a_norm": None,
    "kv_b": 0,
    "o": 1,
    "o_bias": None,
    "sinks": 0,
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
    "gate_bias": 0,
    "up_bias": 0,
    "down": 1,
    "down_bias": None,
    "router": None,
    "router_bias": None,
    "expert_bias": None,
    "shared_gate": 0,
    "shared_up": 0,
    "shared_gate_bias": 0,
    "shared_up_bias": 0,
    "shared_down": 1,
    "shared_down_bias": None,
    "shared_expert_gate": None,
    "embed": 0,
    "positions": None,
    "norm": None,
    "norm_bias": None,
    "lm_head": 0,
}


# The matrices of a decoder layer that Muon updates, each by itself. It leaves a router, whose rows are vectors of
# experts, and a gate of one row to AdamW.
MATRICES = (
    *("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b", "o"),
    *("gate", "up", "down", "shared_gate", "shared_up", "shared_down"),
)
WHOLE = ("q_a", "kv_a")  # the matrices of a layer, beside routers, that every rank has whole

Matrix: TypeAlias = Any  # NumPy's array or Paddle's tensor, which have no base in common
EXPERT = "{expert}"  # stands for an expert's number in a Slot's name
_NUMBER = re.compile(r"(.*\bexperts\.)(0|[1-9]\d*)(\..+)")  # an expert's, in all layouts that name single experts


@dataclass(frozen=True)
class Slot:
    """One stored tensor, or one for each expert: its name (after the layer's prefix, if it is a layer's) and its parts.

    transposed: it is stored [in, out]. grouped: its rows go by kv head (queries, key, value) instead of part by part.
    in_turn: they are the first of each part, then the second of each, and so on.
    experts: its parts are experts'. With EXPERT in the name each expert has such a tensor; else one tensor has those of
    all, stacked on a first axis.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    grouped: bool = False
    experts: bool = False
    in_turn: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the tensor's first axis is that of the experts."""
        return self.experts and EXPERT not in self.name


class Place(NamedTuple):
    """Where a stored tensor stands: the layer's number, None outside of the layers; that of the expert, None unless
    the expert has a tensor of its own; and the Slot."""

    layer: int | None
    expert: int | None
    slot: Slot


class Part(NamedTuple):
    """A part of a model: the layer's number, None outside of the layers; the expert's, None for what is no expert's;
    and its name, one of SPLIT_AXIS."""

    layer: int | None
    expert: int | None
    name: str


@dataclass(frozen=True)
class Layout:
    """The tensors of a checkpoint. `kind` is te, pd or hf; `title` is for messages.

    layer, sparse: the Slots of a decoder layer with an MLP, and of one with experts.
    """

    family: Family
    kind: str
    title: str
    prefix: str
    layer: tuple[Slot, ...]
    model: tuple[Slot, ...]
    sparse: tuple[Slot, ...] = ()
    fuse_attention_qkv: bool = False
    fuse_attention_ffn: bool = False

    @cached_property
    def _slots(self) -> tuple[dict[str, Slot], dict[str, Slot]]:
        of_layers = {slot.name: slot for slot in (*self.layer, *self.sparse)}
        return of_layers, {slot.name: slot for slot in self.model}

    @cached_property
    def _in_layer(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.prefix) + r"(0|[1-9]\d*)\.(.+)")

    def find(self, name: str) -> Place | None:
        """Return the Place of a tensor's name; None for a name that the layout does not have."""
        of_layers, model = self._slots
        if name in model:
            return Place(None, None, model[name])
        match = self._in_layer.fullmatch(name)
        if match is None:
            return None
        if slot := of_layers.get(match[2]):
            return Place(int(match[1]), None, slot)
        number = _NUMBER.fullmatch(match[2])
        if number and (slot := of_layers.get(f"{number[1]}{EXPERT}{number[3]}")):
            return Place(int(match[1]), int(number[2]), slot)
        return None

    def place(self, name: str) -> Place:
        """Return `find` of a name that the layout has, as `detect` has made sure."""
        found = self.find(name)
        assert found is not None
        return found

    def is_matrix(self, name: str) -> bool:
        """Return whether a tensor has matrices of a decoder layer that Muon updates; see MATRICES."""
        place = self.find(name)
        return place is not None and place.layer is not None and place.slot.parts[0] in MATRICES

    def slots(self, layer: LayerSpec) -> tuple[Slot, ...]:
        """Return the Slots of a decoder layer."""
        slots, lacking = self.layer, _lacking_of_attention(layer.attention)
        if isinstance(layer.feed_forward, ExpertsSpec):
            slots, lacking = self.sparse, (*lacking, *_lacking(layer.feed_forward))
        return tuple(slot for slot in slots if slot.parts[0] not in lacking)

    @property
    def layer_parts(self) -> list[str]:
        """The names of the parts of a decoder layer with an MLP."""
        return [part for slot in self.layer for part in slot.parts]

    def model_name(self, part: str) -> str:
        """Return the name of the tensor outside of the layers that holds a part."""
        return next(slot.name for slot in self.model if slot.parts == (part,))

    def full_name(self, place: Place) -> str:
        """Return the name under which the tensor at a Place is stored."""
        if place.layer is None:
            return place.slot.name
        return f"{self.prefix}{place.layer}.{place.slot.name.replace(EXPERT, str(place.expert))}"

    def tensors(self, model: ModelSpec) -> list[Place]:
        """Return the Places of all tensors of a model, in the order in which they are written.

        The experts' tensors of a Slot follow one another: who writes them reads one that holds all of them once.
        """
        outside = [Place(None, None, slot) for slot in self.model]
        inside = (
            Place(number, expert, slot)
            for number, layer in enumerate(model.layers)
            for slot in self.slots(layer)
            for expert in _experts_of(layer, slot)
        )
        return [*outside[:1], *inside, *outside[1:]]


def _lacking_of_attention(attention: AttentionSpec) -> tuple[str, ...]:
    """Return the parts that latent attention does not have, of those that may make its queries."""
    if attention.latent is None:
        return ()
    return ("q_a", "q_a_norm", "q_b") if attention.latent.q_rank is None else ("q",)


def _lacking(experts: ExpertsSpec) -> tuple[str, ...]:
    """Return the parts that a mixture of experts does not have."""
    shared = [name for name in SPLIT_AXIS if name.startswith("shared") and name != "shared_expert_gate"]
    there = {
        "expert_bias": experts.expert_bias,
        "shared_expert_gate": experts.shared_gate,
        **dict.fromkeys(shared, experts.shared_ffn is not None),
    }
    return tuple(name for name, has in there.items() if not has)


def _experts_of(layer: LayerSpec, slot: Slot) -> Iterable[int | None]:
    """Return the experts that have a tensor of a Slot each; (None,) for a Slot of one tensor."""
    if slot.stacked or not slot.experts:
        return (None,)
    assert isinstance(layer.feed_forward, ExpertsSpec)
    return range(layer.feed_forward.experts)


_QK_NORMS = {None: (), "head": ("q_norm", "k_norm"), "all": ("all_q_norm", "all_k_norm")}
_LATENT = ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b")
_QKV, _QKV_BIAS, _GATE_UP = FUSED["qkv"], ("q_bias", "k_bias", "v_bias"), FUSED["gate_up"]


def te_layout(tied: bool = False, family: Family = LLAMA) -> Layout:
    """Return Transformer Engine's layout of a Family. tied: lm_head shares the embedding's shape [vocab, hidden]."""
    native = native_layout(tied=tied, family=family)
    attention, mlp, moe = "transformer.self_attention.", "transformer.layernorm_mlp.", "transformer.moe_layer."
    gate_up = _GATE_UP if family.gated else ("up",)
    of_biases = _biases(gate_up)
    latent_slots = (
        Slot(f"{attention}ln_weight", ("attention_norm",)),
        Slot(f"{attention}linear_q_proj.weight", ("q",)),
        Slot(f"{attention}linear_q_down_proj.weight", ("q_a",)),
        Slot(f"{attention}linear_q_up_proj.ln_weight", ("q_a_norm",)),
        Slot(f"{attention}linear_q_up_proj.weight", ("q_b",)),
        Slot(f"{attention}linear_kv_down_proj.weight", ("kv_a",)),
        Slot(f"{attention}linear_kv_up_proj.ln_weight", ("kv_a_norm",)),
        Slot(f"{attention}linear_kv_up_proj.weight", ("kv_b",)),
        Slot(f"{attention}proj.weight", ("o",)),
    )
    attention_slots = (
        latent_slots
        if family.latent
        else (
            Slot(f"{attention}layernorm_qkv.ln_weight", ("attention_norm",)),
            Slot(f"{attention}layernorm_qkv.ln_bias", ("attention_norm_bias",)),
            Slot(f"{attention}layernorm_qkv.weight", _QKV),
            Slot(f"{attention}layernorm_qkv.bias", _QKV_BIAS),
            Slot(f"{attention}q_norm.weight", ("q_norm",)),
            Slot(f"{attention}k_norm.weight", ("k_norm",)),
            Slot(f"{attention}q_norm.weight", ("all_q_norm",)),
            Slot(f"{attention}k_norm.weight", ("all_k_norm",)),
            Slot(f"{attention}core_attention.softmax_offset", ("sinks",)),
            Slot(f"{attention}proj.weight", ("o",)),
            Slot(f"{attention}proj.bias", ("o_bias",)),
            Slot(f"{attention}post_norm.weight", ("attention_post_norm",)),
        )
    )
    dense_slots = (
        Slot(f"{mlp}ln_weight", ("mlp_norm",)),
        Slot(f"{mlp}ln_bias", ("mlp_norm_bias",)),
        Slot(f"{mlp}fc1_weight", gate_up),
        Slot(f"{mlp}fc1_bias", of_biases),
        Slot(f"{mlp}fc2_weight", ("down",)),
        Slot(f"{mlp}fc2_bias", ("down_bias",)),
        Slot(f"{mlp}post_norm.weight", ("mlp_post_norm",)),
    )
    sparse_slots = (
        Slot(f"{moe}ln_weight", ("mlp_norm",)),
        Slot(f"{moe}ln_bias", ("mlp_norm_bias",)),
        Slot(f"{moe}router.weight", ("router",)),
        Slot(f"{moe}router.bias", ("router_bias",)),
        Slot(f"{moe}router.expert_bias", ("expert_bias",)),
        Slot(f"{moe}experts.fc1_weight", gate_up, experts=True),
        Slot(f"{moe}experts.fc1_bias", of_biases, experts=True),
        Slot(f"{moe}experts.fc2_weight", ("down",), experts=True),
        Slot(f"{moe}experts.fc2_bias", ("down_bias",), experts=True),
        Slot(f"{moe}shared_experts.fc1_weight", tuple(f"shared_{part}" for part in gate_up)),
        Slot(f"{moe}shared_experts.fc1_bias", tuple(f"shared_{part}" for part in of_biases)),
        Slot(f"{moe}shared_experts.fc2_weight", ("shared_down",)),
        Slot(f"{moe}shared_experts.fc2_bias", ("shared_down_bias",)),
        Slot(f"{moe}shared_experts.gate_weight", ("shared_expert_gate",)),
    )
    theirs, parts_of = hf_layout(family=family), lambda slots: {part for slot in slots for part in slot.parts}
    dense, sparse = parts_of(theirs.layer), parts_of(theirs.sparse) | {"expert_bias"}
    return Layout(
        family,
        "te",
        "Transformer Engine's",
        native.prefix,
        tuple(slot for slot in (*attention_slots, *dense_slots) if slot.parts[0] in dense),
        native.model,
        tuple(slot for slot in (*attention_slots, *sparse_slots) if theirs.sparse and slot.parts[0] in sparse),
    )


def _slots(family: Family, name: str, module: str, transposed: bool = False, grouped: bool = False) -> list[Slot]:
    """Return the weight and, where the family has it, the bias of a module of that name.

    module: a part, or one of FUSED.
    """
    parts = FUSED.get(module, (module,))
    if module == "expert_bias":
        return [Slot(name, parts)]
    transposed = transposed and not module.endswith("norm")
    slots = [Slot(f"{name}.weight", parts, transposed, grouped)]
    if family.has_bias(parts[0]):
        slots.append(Slot(f"{name}.bias", _biases(parts), grouped=grouped))
    return slots


def _biases(parts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the parts' biases."""
    return tuple(f"{part}_bias" for part in parts)


def _of_all_experts(family: Family, name: str, module: str) -> list[Slot]:
    """Return the weight and, where the family has it, the bias of a module that holds all experts (Names.stacked)."""
    parts = FUSED.get(module, (module,))
    weight = Slot(name, parts, transposed=True, in_turn=len(parts) > 1)
    bias = Slot(f"{name}_bias", _biases(parts), in_turn=len(parts) > 1)
    return [weight, bias] if family.has_bias(parts[0]) else [weight]


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
        *(_LATENT if "kv_a" in names.layer else qkv),
        *_QK_NORMS[family.qk_norm],
        *(("sinks",) if family.sinks else ()),
        "o",
        *(("attention_post_norm",) if after else ()),
        *(("mlp_norm",) if before else ()),
        *mlp,
        "down",
        *(("mlp_post_norm",) if after else ()),
    )
    slots = [
        [Slot(names.layer[module], (module,))]
        if module == "sinks"  # a number a head, of no module
        else _slots(family, names.layer[module], module, names.transposed, grouped and module == "qkv")
        for module in modules
    ]
    return tuple(chain.from_iterable(slots))


_MLP = ("gate", "up", "down")


def _sparse(family: Family, names: Names, layer: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the Slots of a decoder layer with experts under a Names; () where it has none.

    layer: those of a layer with an MLP, whose attention and norms are the same.
    """
    if not names.sparse:
        return ()
    slots = [slot for slot in layer if slot.parts[0].removesuffix("_bias") not in _MLP]
    for module, name in names.sparse.items():
        if module == "gate" and not family.gated:
            continue
        of_experts = module in (*_MLP, "gate_up")
        if of_experts and names.stacked:
            made = _of_all_experts(family, name, module)
        else:
            made = _slots(family, name, module, names.transposed)
        slots += [replace(slot, experts=of_experts) for slot in made]
    return tuple(slots)


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
        fuse_attention_qkv=fuse_attention_qkv,
        fuse_attention_ffn=fuse_attention_ffn,
    )


def hf_layout(tied: bool = False, family: Family = LLAMA) -> Layout:
    """Return Hugging Face's layout of a Family. tied: without lm_head, which is the embedding.

    Of a family that is not in transformers no checkpoint has it; its parts are what the family's layers have.
    """
    names, base = HF[family.names], HF[family.names].base or ""
    layer = _layer(family, names, "qkv" in names.layer, "gate_up" in names.layer)
    outside = tuple(slot for slot in _model(family, names, base) if not (tied and slot.parts == ("lm_head",)))
    sparse = _sparse(family, names, layer)
    return Layout(family, "hf", "Hugging Face's", f"{base}{names.layers}.", layer, outside, sparse)


def layouts_of(family: Family, tied: bool = False) -> list[Layout]:
    """Return all layouts of a Family: PaddleNLP's own and Hugging Face's where these have a class of it."""
    fused = [(qkv, ffn) for qkv in (False, True) for ffn in (False, True)] if family.model_type in PADDLENLP else []
    native = [native_layout(*flags, tied, family) for flags in fused]
    theirs = [hf_layout(family=family)] if family.in_transformers else []
    return [te_layout(tied, family), *native, *theirs]


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
        layer, expert, *_ = *map(int, re.findall(r"\.(\d+)(?=\.)", name)), 0, 0
        places = {
            layout: (
                *(Place(layer, expert, slot) for slot in (*layout.layer, *layout.sparse)),
                *(Place(None, None, slot) for slot in layout.model),
            )
            for layout in known_layouts
        }
        known = {layout.full_name(place) for layout, of_layout in places.items() for place in of_layout}
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

    def parts(self, place: Place, degree: int = 1, rank: int = 0) -> list[Part]:
        """Return the Parts of one rank's tensor at a Place, in its order.

        A tensor of all experts has those of the rank: as many in each of `degree` ranks, in order. Raises
        CheckpointError for a degree that does not divide the experts.
        """
        experts: Iterable[int | None] = (place.expert,)
        if place.slot.stacked:
            each = self.experts_of_a_rank(place.layer, degree)
            experts = range(rank * each, (rank + 1) * each)
        return [Part(place.layer, expert, name) for expert in experts for name in place.slot.parts]

    def experts_of_a_rank(self, layer: int | None, degree: int) -> int:
        """Return how many experts of a layer each of `degree` ranks has. Raises CheckpointError as `parts`."""
        experts = self._experts(layer).experts
        if experts % degree:
            raise CheckpointError(f"num_experts={experts} cannot be divided by tensor_parallel_degree={degree}")
        return experts // degree

    def _layer(self, part: Part | Place) -> LayerSpec:
        return self.spec.layer if part.layer is None else self.spec.layers[part.layer]

    def _experts(self, layer: int | None) -> ExpertsSpec:
        feed_forward = self.spec.layers[layer or 0].feed_forward
        assert isinstance(feed_forward, ExpertsSpec)  # a layer with experts' weights, as `agreement` has made sure
        return feed_forward

    def said(self, key: str) -> int:
        """Return the value of a key of config.json that shapes weights."""
        return self._sizes[key]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        attention, dense, experts = self.spec.layer.attention, self.spec.dense, self.spec.experts
        sizes = {
            "hidden_size": self.spec.hidden,
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.groups,
            "head_dim": attention.head_dim,
            "vocab_size": self.spec.vocabulary,
            "max_position_embeddings": self.spec.positions,
        }
        if (latent := attention.latent) is not None:
            sizes |= {"kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.q_rank or 0}
            sizes |= {"qk_rope_head_dim": latent.turned, "v_head_dim": latent.value_dim}
            sizes |= {"qk_nope_head_dim": attention.head_dim - latent.turned}
        if experts is not None:
            sizes |= {"num_experts": experts.experts, experts_width(self.spec.family): experts.ffn}
            sizes |= {"shared_expert_intermediate_size": experts.shared_ffn or 0}
        return sizes | ({} if dense is None else {"intermediate_size": dense.ffn})

    def _shape(self, part: Part) -> Shape:
        """Return the whole shape of a part."""
        layer, h, v = self._layer(part), self.spec.hidden, self.spec.vocabulary
        q, kv, d = layer.attention.q_size, layer.attention.kv_size, layer.attention.head_dim
        shapes: dict[str, Shape] = {
            "q": (q, h),
            "k": (kv, h),
            "v": (kv, h),
            "q_bias": (q,),
            "k_bias": (kv,),
            "v_bias": (kv,),
            "all_q_norm": (q,),
            "all_k_norm": (kv,),
            "sinks": (layer.attention.heads,),
            "q_norm": (d,),
            "k_norm": (d,),
            "o": (h, layer.attention.context_size),
            "embed": (v, h),
            "positions": (self.spec.positions, h),
            "lm_head": (v, h),
        }
        shapes |= self._shapes_of_feed_forward(layer) | self._shapes_of_latent(layer.attention)
        return shapes.get(part.name, (h,))  # of a norm, or of a bias behind the second GEMM

    def _shapes_of_latent(self, attention: AttentionSpec) -> dict[str, Shape]:
        if (latent := attention.latent) is None:
            return {}
        h, of_key = self.spec.hidden, attention.head_dim - latent.turned
        shapes: dict[str, Shape] = {
            "kv_a": (latent.kv_rank + latent.turned, h),
            "kv_a_norm": (latent.kv_rank,),
            "kv_b": (attention.heads * (of_key + latent.value_dim), latent.kv_rank),
        }
        if latent.q_rank is None:
            return shapes
        rank = latent.q_rank
        return shapes | {"q_a": (rank, h), "q_a_norm": (rank,), "q_b": (attention.q_size, rank)}

    def _shapes_of_feed_forward(self, layer: LayerSpec) -> dict[str, Shape]:
        f, h = layer.feed_forward.ffn, self.spec.hidden
        shapes: dict[str, Shape] = {"gate": (f, h), "up": (f, h), "gate_bias": (f,), "up_bias": (f,)}
        shapes |= {"down": (h, f)}
        if isinstance(layer.feed_forward, ExpertsSpec):
            experts, shared = layer.feed_forward.experts, layer.feed_forward.shared_ffn or 0
            shapes |= {"router": (experts, h), "router_bias": (experts,), "expert_bias": (experts,)}
            shapes |= {"shared_expert_gate": (1, h), "shared_gate_bias": (shared,)}
            shapes |= {"shared_gate": (shared, h), "shared_up": (shared, h), "shared_up_bias": (shared,)}
            shapes |= {"shared_down": (h, shared)}
        return shapes

    def part_shape(self, part: Part, degree: int = 1) -> Shape:
        """Return the shape of one rank's share of a Part, [out, in] (a bias: [out], a norm: [hidden]).

        As in PaddleNLP, what `degree` does not divide is not split: key and value when there are fewer kv heads,
        embedding and lm_head when the vocabulary is odd. Raises CheckpointError when q, o or the MLP cannot be split.
        """
        shape, axis = [*self._shape(part)], SPLIT_AXIS[part.name]
        if axis is not None and self.splits(part, degree):
            shape[axis] //= degree
        return tuple(shape)

    def share(self, part: Part, degree: int, rank: int) -> tuple[slice, ...]:
        """Return the slices, one for each axis, that are a rank's share of a Part."""
        slices, axis = [slice(None)] * len(self._shape(part)), SPLIT_AXIS[part.name]
        if axis is not None and self.splits(part, degree):
            width = self.part_shape(part, degree)[axis]
            slices[axis] = slice(rank * width, (rank + 1) * width)
        return tuple(slices)

    def splits(self, part: Part, degree: int) -> bool:
        """Return whether tensor parallelism of that degree splits a Part."""
        if SPLIT_AXIS[part.name] is None or part.expert is not None or degree == 1:
            return False
        size, what, must = self._divided(part)
        if must and size % degree:
            raise CheckpointError(f"{what}={size} cannot be divided by tensor_parallel_degree={degree}")
        return size % degree == 0

    def _divided(self, part: Part) -> tuple[int, str, bool]:
        """Return (what ranks divide of a Part, its key in config.json, whether they must be able to)."""
        attention, name = self._layer(part).attention, part.name.removesuffix("_bias")
        if name in ("q", "q_b", "kv_b", "o", "all_q_norm", "sinks"):
            return attention.heads, "num_attention_heads", True
        if name in ("k", "v", "all_k_norm"):
            return attention.groups, "num_key_value_heads", False
        if name in ("embed", "lm_head"):
            return self.spec.vocabulary, "vocab_size", False
        key = self.width_of(part)
        return self.said(key), key, True

    def width_of(self, part: Part) -> str:
        """Return config.json's key for the width of the MLP that a Part is of."""
        if part.name.startswith("shared"):
            return "shared_expert_intermediate_size"
        return "intermediate_size" if part.expert is None else experts_width(self.spec.family)

    def slot_shape(self, place: Place, degree: int = 1) -> Shape:
        """Return the shape of one rank's stored tensor."""
        slot, parts = place.slot, self.parts(place, degree)
        first, *others = [self.part_shape(part, degree) for part in parts[: len(slot.parts)]]  # of one expert
        if slot.parts in (_QKV, _QKV_BIAS) and degree > 1 and not self.splits(parts[1], degree):
            heads = self.said("num_key_value_heads")
            raise CheckpointError(
                f"num_key_value_heads={heads} cannot be divided by tensor_parallel_degree={degree}, which "
                f"{slot.name} with q, k and v in one tensor needs"
            )
        shape = (first[0] + sum(other[0] for other in others), *first[1:])
        shape = shape[::-1] if slot.transposed else shape
        return (len(parts) // len(slot.parts), *shape) if slot.stacked else shape

    def take_apart(self, place: Place, tensor: Matrix, degree: int = 1, rank: int = 0) -> dict[Part, Matrix]:
        """Return {Part: [out, in] or [out]} of the tensor at a Place, whole or one rank's; views where possible.

        tensor: numpy array or Paddle tensor. degree, rank: which experts it has, as for `parts`.
        """
        parts = self.parts(place, degree, rank)
        if not place.slot.stacked:
            return dict(zip(parts, self._taken_apart(place, tensor), strict=True))
        taken = chain.from_iterable(self._taken_apart(place, tensor[expert]) for expert in range(tensor.shape[0]))
        return dict(zip(parts, taken, strict=True))

    def _taken_apart(self, place: Place, tensor: Matrix) -> list[Matrix]:
        """Return the parts of a Slot in their order: of one expert, where it is of experts."""
        slot, attention = place.slot, self._layer(place).attention
        if slot.transposed:
            tensor = tensor.T
        if len(slot.parts) == 1:
            return [tensor]
        if slot.grouped:
            return _ungrouped(tensor, attention)
        if slot.in_turn:
            return [tensor[first :: len(slot.parts)] for first in range(len(slot.parts))]
        shares = (attention.queries, 1, 1) if len(slot.parts) == 3 else (1, 1)
        unit = tensor.shape[0] // sum(shares)
        stops = [unit * stop for stop in accumulate(shares)]
        return [tensor[stop - unit * n : stop] for stop, n in zip(stops, shares, strict=True)]

    def put_together(self, place: Place, parts: Mapping[Part, Matrix]) -> Matrix:
        """Return the tensor at a Place from {Part: [out, in] or [out]}, of those experts that are there; the inverse of
        `take_apart`."""
        slot, tensors = place.slot, self._stack(place, parts)
        if slot.stacked:
            count = len(slot.parts)
            join = _in_turn if slot.in_turn else lambda tensors: concat(tensors, 0)
            each = [join(tensors[start : start + count]) for start in range(0, len(tensors), count)]
            return stack([tensor.T if slot.transposed else tensor for tensor in each])
        tensor = concat(tensors, 0)
        return tensor.T if slot.transposed else tensor

    def pieces(self, place: Place, parts: Mapping[Part, Matrix]) -> list[Matrix]:
        """Return the arrays whose bytes, one array's after the other's, are those of the tensor at a Place."""
        slot = place.slot
        return [self.put_together(place, parts)] if slot.transposed or slot.in_turn else self._stack(place, parts)

    def _stack(self, place: Place, parts: Mapping[Part, Matrix]) -> list[Matrix]:
        """Return the tensors whose rows, one tensor's after the other's, are those of a Place before transposition."""
        tensors = [parts[part] for part in self.parts(place) if part in parts or not place.slot.stacked]
        if not place.slot.grouped:
            return tensors
        groups = tensors[1].shape[0] // self._layer(place).attention.head_dim
        rows = [tensor.shape[0] // groups for tensor in tensors]
        return [t[n * g : n * (g + 1)] for g in range(groups) for t, n in zip(tensors, rows, strict=True)]


def _ungrouped(tensor: Matrix, attention: AttentionSpec) -> list[Matrix]:
    """Return q, k and v of rows that go by kv head."""
    queries, head_dim = attention.queries, attention.head_dim
    step, stops = (queries + 2) * head_dim, [n * head_dim for n in (0, queries, queries + 1, queries + 2)]
    groups = range(0, tensor.shape[0], step)
    return [concat([tensor[group + start : group + stop] for group in groups], 0) for start, stop in pairwise(stops)]


def _in_turn(tensors: Sequence[Matrix]) -> Matrix:
    """Return one row of each tensor after the other; the inverse of every so manieth row."""
    return stack(tensors, 1).reshape([-1, *tensors[0].shape[1:]])


def stack(tensors: Sequence[Matrix], axis: int = 0) -> Matrix:
    """Return numpy arrays or Paddle tensors on a new axis."""
    if isinstance(tensors[0], np.ndarray):
        return np.stack(tensors, axis)
    import paddle

    return paddle.stack([*tensors], axis)


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
    dims = Dims(spec_of(config))
    parts: dict[int | None, dict[Part, Matrix]] = {}
    for name, tensor in state_dict.items():
        place = source.place(name)
        parts.setdefault(place.layer, {}).update(dims.take_apart(place, tensor))
    for layer, found in parts.items():
        if layer is not None:
            _check_layer(layer, found, source.layer_parts, dims.spec.layers[layer].attention.queries)
    converted = {}
    for layer, found in parts.items():
        for slot in target.model if layer is None else target.layer:
            place = Place(layer, None, slot)
            if all(part in found for part in dims.parts(place)):
                converted[target.full_name(place)] = dims.put_together(place, found)
    return converted


def _check_layer(layer: int, parts: Mapping[Part, Matrix], wanted: Iterable[str], queries: int) -> None:
    missing = [name for name in wanted if Part(layer, None, name) not in parts]
    if missing:
        raise CheckpointError(f"layer {layer} has no {', '.join(missing)}")
    q, k = (parts[Part(layer, None, name)].shape[0] for name in "qk")
    if q != queries * k:
        raise CheckpointError(
            f"layer {layer}: q has {q} rows and k {k}, which contradicts {queries} query heads to each kv head"
        )
