"""Where each weight of a model stands in a checkpoint: a Layout's tensors, and the parts that each one holds.

A model has *parts* (q, k, v, o, gate, ...), each a matrix [out, in], a bias [out] or a norm's vector, and each in a
layer, of an expert or of none. A layout says which tensors a checkpoint has and which parts each of them holds, how. To
convert is to take the tensors of one layout apart and to put those of the other together; a new layout is a new
table in `layouts`. There are three kinds, each for every family of models:

- "te": Transformer Engine's decoder layers, weights [out, in], q, k, v stacked on out, gate and up likewise. One tensor
  [experts, out, in] has the weights of all experts of a layer.
- "pd": PaddleNLP's native layers, weights [in, out]; fuse_attention_qkv and fuse_attention_ffn each fuse or not.
  A fused qkv keeps each kv head together with its queries: [q1, q2, k1, v1, q3, q4, k2, v2] (see fuse_param_func in
  paddlenlp/transformers/conversion_utils.py). Its rope turns the same halves of a head as Hugging Face's and ours.
- "hf": Hugging Face transformers, weights [out, in], nothing fused; in GPT-2 [in, out], and q, k, v stacked on out.
  Each expert has tensors of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paddle_te.configs.families import Family
from paddle_te.configs.spec import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec
from paddle_te.weights.names import FUSED

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


QKV, QKV_BIAS = FUSED["qkv"], ("q_bias", "k_bias", "v_bias")
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
    return ("q_a", "q_a_norm", "q_b") if attention.latent.q_lora_rank is None else ("q",)


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
