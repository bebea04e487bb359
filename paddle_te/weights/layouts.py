"""The layouts of each family of models, and which of them has the names of a checkpoint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from paddle_te.configs.families import FAMILIES, LLAMA, Family
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.weights.layout import QKV, QKV_BIAS, Layout, Place, Slot
from paddle_te.weights.names import FUSED, HF, NATIVE, Names
from paddle_te.weights.tensors import CheckpointError

_QK_NORMS = {None: (), "head": ("q_norm", "k_norm"), "all": ("all_q_norm", "all_k_norm")}
_LATENT = ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b")
GATE_UP, _MLP = FUSED["gate_up"], ("gate", "up", "down")


def te_layout(tied: bool = False, family: Family = LLAMA) -> Layout:
    """Return Transformer Engine's layout of a Family. tied: lm_head shares the embedding's shape [vocab, hidden]."""
    native, theirs = native_layout(tied=tied, family=family), hf_layout(family=family)
    attention = _te_latent_attention() if family.latent else _te_attention()
    gate_up = GATE_UP if family.gated else ("up",)
    dense, sparse = _parts_of(theirs.layer), _parts_of(theirs.sparse) | {"expert_bias"}
    return Layout(
        family,
        "te",
        "Transformer Engine's",
        native.prefix,
        tuple(slot for slot in (*attention, *_te_mlp(gate_up)) if slot.parts[0] in dense),
        native.model,
        tuple(slot for slot in (*attention, *_te_experts(gate_up)) if theirs.sparse and slot.parts[0] in sparse),
    )


def _parts_of(slots: Iterable[Slot]) -> set[str]:
    return {part for slot in slots for part in slot.parts}


def _te_attention() -> tuple[Slot, ...]:
    """Return the Slots of an attention half, of all that families have."""
    attention = "transformer.self_attention."
    return (
        Slot(f"{attention}layernorm_qkv.ln_weight", ("attention_norm",)),
        Slot(f"{attention}layernorm_qkv.ln_bias", ("attention_norm_bias",)),
        Slot(f"{attention}layernorm_qkv.weight", QKV),
        Slot(f"{attention}layernorm_qkv.bias", QKV_BIAS),
        Slot(f"{attention}q_norm.weight", ("q_norm",)),
        Slot(f"{attention}k_norm.weight", ("k_norm",)),
        Slot(f"{attention}q_norm.weight", ("all_q_norm",)),
        Slot(f"{attention}k_norm.weight", ("all_k_norm",)),
        Slot(f"{attention}core_attention.softmax_offset", ("sinks",)),
        Slot(f"{attention}proj.weight", ("o",)),
        Slot(f"{attention}proj.bias", ("o_bias",)),
        Slot(f"{attention}post_norm.weight", ("attention_post_norm",)),
    )


def _te_latent_attention() -> tuple[Slot, ...]:
    """Return the Slots of a half with latent attention."""
    attention = "transformer.self_attention."
    return (
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


def _te_mlp(gate_up: tuple[str, ...]) -> tuple[Slot, ...]:
    """Return the Slots of an MLP half. gate_up: the parts of its first GEMM."""
    mlp, of_biases = "transformer.layernorm_mlp.", _biases(gate_up)
    return (
        Slot(f"{mlp}ln_weight", ("mlp_norm",)),
        Slot(f"{mlp}ln_bias", ("mlp_norm_bias",)),
        Slot(f"{mlp}fc1_weight", gate_up),
        Slot(f"{mlp}fc1_bias", of_biases),
        Slot(f"{mlp}fc2_weight", ("down",)),
        Slot(f"{mlp}fc2_bias", ("down_bias",)),
        Slot(f"{mlp}post_norm.weight", ("mlp_post_norm",)),
    )


def _te_experts(gate_up: tuple[str, ...]) -> tuple[Slot, ...]:
    """Return the Slots of a half with experts. gate_up: the parts of an expert's first GEMM."""
    moe, of_biases = "transformer.moe_layer.", _biases(gate_up)
    return (
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
    qkv = ("qkv",) if fuse_qkv else QKV
    mlp = ("up",) if not family.gated else ("gate_up",) if fuse_ffn else GATE_UP
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

    A family that is not in transformers has no such checkpoints. The layout's parts are then those of its layers.
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
