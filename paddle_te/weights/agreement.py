"""Check that a checkpoint's tensors make the whole model that its config.json describes.

Nothing here decides between the two: where they contradict each other, the error names the key and the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paddle_te.weights.layout import SPLIT_AXIS, WHOLE, Layout, Part, Place
from paddle_te.weights.tensors import NUMBERS, CheckpointError, Shape, StoredTensor, same_bytes

if TYPE_CHECKING:
    from paddle_te.weights.folder import Checkpoint

# The keys of config.json that say how many rows a part has; of other parts, and for all columns but down's and those of
# _COLUMNS, it is one
_ROWS = {
    "k": ("num_key_value_heads", "num_attention_heads"),
    "v": ("num_key_value_heads", "num_attention_heads"),
    "q_a": ("q_lora_rank",),
    "q_a_norm": ("q_lora_rank",),
    "q_b": ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"),
    "kv_a": ("kv_lora_rank", "qk_rope_head_dim"),
    "kv_a_norm": ("kv_lora_rank",),
    "kv_b": ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"),
    "embed": ("vocab_size",),
    "lm_head": ("vocab_size",),
    "positions": ("max_position_embeddings",),
}
_COLUMNS = {"q_b": ("q_lora_rank",), "kv_b": ("kv_lora_rank",)}
_WIDTH = ("hidden_size",)
_EXPERTS = ("num_experts",)
_OF_MLP = {False: ("gate", "up", "shared_gate", "shared_up"), True: ("down", "shared_down")}  # by columns
_ROUTERS = ("router", "router_bias", "expert_bias")
# The keys of config.json that say whether the projections of a decoder layer's half have biases
_BIAS_KEYS = {"attn": "attention_bias", "attention": "attention_bias", "mlp": "mlp_bias"}


def check_agreement(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the tensors of an opened Checkpoint are those of its config.json, all of them."""
    _check_places(checkpoint)
    _check_shapes(checkpoint)
    _check_complete(checkpoint)
    _check_dtypes(checkpoint)
    _check_head(checkpoint)


def check_biases(
    names: Iterable[str], layouts: Iterable[Layout], config: Mapping[str, Any], describe: Callable[[str], str]
) -> None:
    """Raise CheckpointError for a bias that a module of one of the Layouts has in the file and not in config.json.

    names: the tensors'. describe: makes a name's text in a message.
    """
    for name in names:
        weight = name.removesuffix("bias") + "weight"
        known = any(layout.find(name) for layout in layouts)
        if name.endswith("bias") and not known and any(layout.find(weight) for layout in layouts):
            raise CheckpointError(
                f"{describe(name)}: a model without this bias follows from config.json: {_no_bias(name, config)}"
            )


def _no_bias(name: str, config: Mapping[str, Any]) -> str:
    key = next((key for word, key in _BIAS_KEYS.items() if word in name), None)
    said = f", {key}={config.get(key)!r}" if key else ""
    return f"model_type={config.get('model_type', 'llama')!r}{said}"


def _check_places(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a tensor of a layer, or of an expert, that the model does not have."""
    layout, spec = checkpoint.layout, checkpoint.dims.spec
    wanted = {layout.full_name(place) for place in layout.tensors(spec)}
    for name, ref, place in _stored(checkpoint):
        if place.layer is None or name in wanted:
            continue
        if place.layer >= len(spec.layers):
            raise CheckpointError(
                f"{checkpoint.folder}: {name!r}: config.json has only {len(spec.layers)} layers (num_hidden_layers)"
            )
        if place.expert is not None and place.slot in layout.slots(spec.layers[place.layer]):
            count = checkpoint.dims.said("num_experts")
            raise CheckpointError(f"{ref.path}: {name!r}: config.json has only {count} experts")
        kind = "an MLP" if spec.experts is None or place.slot in layout.sparse else "experts"
        raise CheckpointError(f"{ref.path}: {name!r}: layer {place.layer} has {kind} instead, as config.json says")


def _check_shapes(checkpoint: Checkpoint) -> None:
    for name, ref, place in _stored(checkpoint):
        expected = checkpoint.dims.slot_shape(place, checkpoint.tp)
        if tuple(ref.shape) != expected:
            ranks = f" over {checkpoint.tp} tensor parallel ranks" * (checkpoint.tp > 1)
            keys = _responsible(checkpoint, place, tuple(ref.shape), expected)
            said = ", ".join(f"{key}={checkpoint.dims.said(key)}" for key in keys)
            raise CheckpointError(
                f"{ref.path}: {name!r} has shape {list(ref.shape)}, but {list(expected)} follows from {said} in "
                f"config.json (or the arguments){ranks}"
            )


def _responsible(checkpoint: Checkpoint, place: Place, found: Shape, expected: Shape) -> tuple[str, ...]:
    """Return the keys of config.json behind the first axis in which two shapes of a Place's tensor differ."""
    if len(found) != len(expected):
        return _WIDTH
    axis = next(axis for axis, sizes in enumerate(zip(found, expected, strict=True)) if sizes[0] != sizes[1])
    if place.slot.stacked and axis == 0:
        return _EXPERTS
    columns = axis - place.slot.stacked != (1 if place.slot.transposed else 0)
    part = checkpoint.dims.parts(place)[-1]
    name = part.name.removesuffix("_bias")
    if name in _OF_MLP[columns]:
        return (checkpoint.dims.width_of(part),)
    if name in _ROUTERS and not columns:
        return _EXPERTS
    return (_COLUMNS if columns else _ROWS).get(name, _WIDTH)


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, StoredTensor, Place]]:
    """Yield (name, StoredTensor, Place) of all tensors of all ranks."""
    for rank in checkpoint.ranks.values():
        for name, ref in rank.tensors.items():
            yield name, ref, checkpoint.layout.place(name)


def _check_complete(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless each tensor parallel rank has every part of the model, spread over its stages."""
    places = checkpoint.layout.tensors(checkpoint.dims.spec)
    for tp in sorted({key[0] for key in checkpoint.ranks}, key=lambda rank: rank or 0):
        found = _parts_of_rank(checkpoint, tp)
        wanted = ((part, place) for place in places for part in checkpoint.dims.parts(place, checkpoint.tp, tp or 0))
        for part, place in wanted:
            if part not in found and not (checkpoint.tied and part.name == "lm_head"):
                raise CheckpointError(_what_is_missing(checkpoint, tp, part, place))


def _parts_of_rank(checkpoint: Checkpoint, tp: int | None) -> dict[Part, str]:
    """Return {Part: name of the tensor that holds it} of a tensor parallel rank's pipeline stages."""
    found: dict[Part, str] = {}
    for rank in (rank for rank in checkpoint.ranks.values() if rank.tp == tp):
        for name, ref in rank.tensors.items():
            for part in checkpoint.dims.parts(checkpoint.layout.place(name), checkpoint.tp, tp or 0):
                twice = found.get(part)
                if twice and part.layer is not None:  # several stages may have a tied embedding
                    raise CheckpointError(
                        f"{ref.path}: {name!r} holds {part.name} of layer {part.layer}, and so does {twice!r}"
                    )
                found[part] = name
    return found


def _what_is_missing(checkpoint: Checkpoint, tp: int | None, part: Part, place: Place) -> str:
    layout = checkpoint.layout
    where = f" (rank tp{tp:02d})" if tp is not None else ""
    text = f"{checkpoint.folder}: incomplete: no file{where} has {layout.full_name(place)!r}"
    if part.name == "lm_head":
        return f"{text}, and config.json does not say tie_word_embeddings=true, with which the embedding is the head"
    if part.name.endswith("_bias"):
        return f"{text}, which a model of model_type={layout.family.model_type!r} in config.json has"
    if part.layer is not None:
        return f"{text}; config.json says num_hidden_layers={checkpoint.dims.num_hidden_layers}"
    return text


def _check_dtypes(checkpoint: Checkpoint) -> None:
    """Matrices must share one dtype, config.json's where it names one; norms and routers have others or the same."""
    seen: dict[str, tuple[str, StoredTensor]] = {}
    for name, ref, place in _stored(checkpoint):
        part = place.slot.parts[0]
        is_norm = SPLIT_AXIS[part] is None and part not in WHOLE
        kind = part if part in _ROUTERS else "norms" if is_norm else "matrices"
        first = seen.setdefault(kind, (name, ref))
        if ref.dtype != first[1].dtype:
            raise CheckpointError(
                f"{ref.path}: mixed dtypes: {name!r} is {ref.dtype}, "
                f"{first[0]!r} in {first[1].path.name} is {first[1].dtype}"
            )
    _check_said_dtype(checkpoint, *seen["matrices"])


def _check_said_dtype(checkpoint: Checkpoint, name: str, ref: StoredTensor) -> None:
    for key in ("dtype", "torch_dtype"):
        said = str((checkpoint.config or {}).get(key)).removeprefix("torch.").removeprefix("paddle.")
        if said in NUMBERS and said != ref.dtype:
            raise CheckpointError(
                f"{ref.path}: {name!r} is {ref.dtype}, but config.json says {key}={said!r}: one of them is wrong; "
                f"write {ref.dtype!r} there if it is config.json"
            )


def _check_head(checkpoint: Checkpoint) -> None:
    """A head that is the embedding may be stored again, but not with other numbers."""
    if not checkpoint.tied:
        return
    for tp in {key[0] for key in checkpoint.ranks}:
        ranks = [rank for rank in checkpoint.ranks.values() if rank.tp == tp]
        stored = [(name, ref) for rank in ranks for name, ref in rank.tensors.items()]
        embed_name, embed = next(_holding(checkpoint, stored, "embed"))
        for name, head in _holding(checkpoint, stored, "lm_head"):
            if not same_bytes(embed, head):
                raise CheckpointError(
                    f"{head.path}: {name!r} has other numbers than {embed_name!r}, but config.json says "
                    "tie_word_embeddings=true, that they are one weight: set it to false to keep this head, or remove "
                    f"{name!r} from the file to use the embedding, as transformers does"
                )


def _holding(
    checkpoint: Checkpoint, stored: Iterable[tuple[str, StoredTensor]], part: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Return those of stored (name, StoredTensor) that hold a part outside of the layers."""
    return ((name, ref) for name, ref in stored if checkpoint.layout.place(name).slot.parts == (part,))
