"""The shapes of a model's weights, what ranks share of them, and how tensors hold their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

import numpy as np

from paddle_te.configs.spec import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, experts_width
from paddle_te.weights.layout import QKV, QKV_BIAS, SPLIT_AXIS, Part, Place
from paddle_te.weights.tensors import CheckpointError, Shape

Matrix: TypeAlias = Any  # NumPy's array or Paddle's tensor, which have no base in common


@dataclass(frozen=True)
class Dims:
    """The shapes of a model's weights, and how ranks share them, from its ModelSpec."""

    spec: ModelSpec

    @property
    def num_hidden_layers(self) -> int:
        """Return the number of decoder layers."""
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
            sizes |= {"kv_lora_rank": latent.kv_lora_rank, "q_lora_rank": latent.q_lora_rank or 0}
            sizes |= {"qk_rope_head_dim": latent.qk_rope_head_dim, "v_head_dim": latent.v_head_dim}
            sizes |= {"qk_nope_head_dim": attention.head_dim - latent.qk_rope_head_dim}
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
        h, of_key = self.spec.hidden, attention.head_dim - latent.qk_rope_head_dim
        shapes: dict[str, Shape] = {
            "kv_a": (latent.kv_lora_rank + latent.qk_rope_head_dim, h),
            "kv_a_norm": (latent.kv_lora_rank,),
            "kv_b": (attention.heads * (of_key + latent.v_head_dim), latent.kv_lora_rank),
        }
        if latent.q_lora_rank is None:
            return shapes
        rank = latent.q_lora_rank
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
        if slot.parts in (QKV, QKV_BIAS) and degree > 1 and not self.splits(parts[1], degree):
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
        """Return the tensor at a Place from {Part: [out, in] or [out]}, of those experts that are there.

        The inverse of `take_apart`.
        """
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
