"""What LoRA's A and B are called in an adapter's folder: made from the table in `layout`, as all names of weights are.

- "peft": Hugging Face's modules, A [r, in] and B [out, r]; the embedding's lie transposed under a name of their own.
- "te": {q,k,v,o,gate,up,down}_proj in Transformer Engine's layer that has the fused weight, A [in, r], B [r, out].
  Those of a layer's experts are one tensor each: A [experts, r, in], B [experts, out, r].
- "pd": PaddleNLP's native modules, fused or not; as te's. A fused one has one A for all its parts.
- "formers": PaddleFormers' modules, which are Hugging Face's; as te's.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from paddle_te.configs.families import FAMILIES, Family
from paddle_te.weights.layout import SPLIT_AXIS, WHOLE, Layout, Place, Slot
from paddle_te.weights.layouts import hf_layout, layouts_of
from paddle_te.weights.tensors import CheckpointError

_PEFT = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?:(?P<factor>[AB])\.weight|embedding_(?P<embedding>[AB]))"
)
_PADDLE = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])")
_TITLES = {"pd": "PaddleNLP's native", "te": "Transformer Engine's", "hf": "PEFT's"}


class Name(NamedTuple):
    """A tensor of an adapter: A or B (factor) beside a module, or, without a factor, a whole weight or bias.

    place: of the module, whose Slot has its parts, or of the weight.
    """

    place: Place
    factor: str | None = None


@dataclass(frozen=True)
class Form:
    """The names of one kind of adapters.

    layout: those of whole weights. modules: of the modules, as a Layout's slots without ".weight".
    """

    kind: str
    title: str
    layout: Layout
    modules: Layout

    @property
    def family(self) -> Family:
        """The models' family."""
        return self.layout.family

    @property
    def transposed(self) -> bool:
        """Whether A and B are stored [in, r] and [r, out]."""
        return self.kind != "peft"

    def find(self, name: str) -> Name | None:
        """Return what the tensor of that name is; None for a name that the form does not have."""
        peft = self.kind == "peft"
        match = (_PEFT if peft else _PADDLE).fullmatch(name)
        if match is None:
            found = self.layout.find(_whole(name) if peft else name)
            return Name(found) if found else None
        found = self.modules.find(match["module"])
        embedding = match["embedding"] if peft else None
        if found is None or bool(embedding) != (found.slot.parts == ("embed",)):
            return None
        return Name(found, match["factor"] or embedding)

    def name_of(self, name: str) -> Name:
        """Return `find` of a name that the form has, as `form_of` has made sure."""
        found = self.find(name)
        assert found is not None
        return found


def _whole(name: str) -> str:
    """Return Hugging Face's name of a weight that PEFT has saved whole."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".") if name.startswith("base_model.") else ""


def form_of(folder: str | Path, names: Collection[str], peft: bool, family: Family | None = None) -> Form:
    """Return the Form that has all names of an adapter's tensors.

    peft: whether it is PEFT's. family: the base's; None: any. Raises CheckpointError, naming a tensor.
    """
    forms = [form for each in ([family] if family else FAMILIES.values()) for form in forms_of(each, peft)]
    for form in forms:
        if all(form.find(name) for name in names):
            return form
    if not forms and family:
        raise CheckpointError(f"{folder}: PEFT's, and transformers has no class for {family.title}")
    nearest = max(forms, key=lambda form: sum(form.find(name) is not None for name in names))
    unknown = next(name for name in names if not nearest.find(name))
    models = " or ".join(each.title for each in ([family] if family else FAMILIES.values()))
    raise CheckpointError(
        f"{folder}: {unknown!r} is none of the tensors that LoRA has beside a {models}: the adapter of another model, "
        "or of another method"
    )


def forms_of(family: Family, peft: bool) -> list[Form]:
    """Return all Forms of PEFT's adapters on a Family's models, none where transformers has none, or of Paddle's."""
    if peft:
        return [_form("peft", hf_layout(family=family))] if family.in_transformers else []
    theirs = [_form(layout.kind, layout) for layout in layouts_of(family) if layout.kind != "hf"]
    formers = _form("formers", hf_layout(family=family), "PaddleFormers'")
    return theirs + [formers] * (family.names == "llama")


def form_for(layout: Layout) -> Form:
    """Return the Form of adapters on a model whose weights are in a Layout, PaddleNLP's or Transformer Engine's."""
    return _form(layout.kind, layout)


def _form(kind: str, layout: Layout, title: str | None = None) -> Form:
    make = _te_modules if layout.kind == "te" else _modules
    outside = _modules(slot for slot in layout.model if slot.parts[0] in ("embed", "lm_head")) if kind == "peft" else ()
    # native and PaddleFormers' experts have no LoRA, nor have PEFT's that are all in one tensor
    has_lora = lambda slot: kind == "te" or kind == "peft" and not slot.stacked or slot in layout.layer  # noqa: E731
    sparse = list(filter(has_lora, layout.sparse))
    inside, experts = (make(filter(_is_projection, slots)) for slots in (layout.layer, sparse))
    modules = replace(layout, layer=inside, model=outside, sparse=experts)
    return Form(kind, title or _TITLES[layout.kind], layout, modules)


def _is_projection(slot: Slot) -> bool:
    part = slot.parts[0]
    return part in WHOLE or SPLIT_AXIS[part] is not None and not part.endswith(("_bias", "norm", "sinks"))


def _modules(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    return tuple(replace(slot, name=slot.name.removesuffix(".weight"), transposed=False) for slot in slots)


def _te_modules(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    return tuple(
        Slot(f"{slot.name.rpartition('.')[0]}.{module_of(part)}", (part,), experts=slot.experts)
        for slot in slots
        for part in slot.parts
    )


def module_of(part: str) -> str:
    """Return the name of what has A and B of a part, in Transformer Engine's layer that has its weight."""
    return f"{part.removeprefix('shared_')}_proj"
