"""Describe a checkpoint's or an adapter's folder as text: layout, dtypes, degrees, step, all names and shapes.

Reads names, shapes and places, no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from paddle_te import commands
from paddle_te.folders import is_adapter
from paddle_te.manifest import MANIFEST
from paddle_te.table import in_columns
from paddle_te.weights.adapters import Adapter, open_adapter
from paddle_te.weights.adapters.peft import base_of, peft_command
from paddle_te.weights.contents import TRAINER_STATE, merge_command, read_state
from paddle_te.weights.folder import Checkpoint, open_checkpoint
from paddle_te.weights.optimizer import STATE_FILES, is_unified
from paddle_te.weights.resharding import saved_degrees
from paddle_te.weights.tensors import STORAGE


def inspect(folder: str | Path, num_attention_heads: int | None = None, num_key_value_heads: int | None = None) -> str:
    """Return the description of a checkpoint, lines of text: facts first, then a table of the tensors.

    The ranks of tensor parallelism have tensors of the same names and shapes, so the table lists those of the first.
    Arguments and errors as `open_checkpoint`'s, and CheckpointError for a damaged trainer_state.json.
    """
    if is_adapter(folder):
        adapter = open_adapter(folder)
        return _as_text(_adapter_facts(adapter), _adapter_rows(adapter))
    checkpoint = open_checkpoint(folder, num_attention_heads, num_key_value_heads)
    return _as_text(_facts(checkpoint), _rows(checkpoint))


def _as_text(facts: Mapping[str, str], rows: Sequence[Sequence[str]]) -> str:
    width = max(map(len, facts))
    return "\n".join([*(f"{name:<{width}}  {fact}" for name, fact in facts.items()), "", *in_columns(rows)])


def _adapter_facts(adapter: Adapter) -> dict[str, str]:
    refs = [ref for refs in adapter.tensors.values() for ref in refs]
    layers = {part.layer for part in adapter.parts if part.layer is not None}
    parts = dict.fromkeys(part.name for part in adapter.parts)
    ranks = sorted({low_rank.rank for low_rank in adapter.parts.values()})
    to_peft = peft_command(adapter)
    return {
        "folder": str(adapter.folder),
        "adapter": f"LoRA, in {adapter.form.title} names",
        "rank": ", ".join(map(str, ranks)),
        "scaling": ", ".join(sorted({f"{low_rank.scaling:g}" for low_rank in adapter.parts.values()})),
        "beside": f"{', '.join(parts)} of {len(layers)} layers",
        "whole": ", ".join(name for _, _, name in adapter.whole.values()) or "none",
        "parameters": f"{sum(prod(ref.shape) for ref in refs):,}",
        "dtypes": ", ".join(sorted({ref.dtype for ref in refs})),
        "made from": adapter.settings.base or "not said",
        "step": _step(adapter.folder),
        "manifest": _manifest(adapter.folder),
        "merge it": merge_command(adapter.folder, base_of(adapter)),
        **({"for vLLM": to_peft} if to_peft else {}),
    }


def _adapter_rows(adapter: Adapter) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "file")]
    for name, refs in adapter.tensors.items():
        rows += [(name, str(list(ref.shape)), ref.dtype, ref.path.name) for ref in refs]
    return rows


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    tensors = [ref for rank in checkpoint.ranks.values() for ref in rank.tensors.values()]
    files = checkpoint.files
    size = sum(prod(ref.shape) * STORAGE[ref.dtype].itemsize for ref in tensors)
    return {
        "folder": str(checkpoint.folder),
        "model": f"{checkpoint.layout.family.title}, {checkpoint.dims.num_hidden_layers} layers",
        "layout": f"{checkpoint.layout.title}",
        "parameters": f"{_parameters(checkpoint):,}",
        "dtypes": ", ".join(sorted({ref.dtype for ref in tensors})),
        "weights": f"{len(files)} {checkpoint.suffix} file{'s' * (len(files) > 1)}, {size / 1e9:,.3f} GB",
        "degrees": str(saved_degrees(checkpoint) or "whole tensors (unified checkpoint)"),
        "optimizer": _optimizer(checkpoint),
        "step": _step(checkpoint.folder),
        "manifest": _manifest(checkpoint.folder),
    }


def _parameters(checkpoint: Checkpoint) -> int:
    """Return how many numbers the whole model has; a tied lm_head that is stored too counts again."""
    places = {place for rank in checkpoint.ranks.values() for place in map(checkpoint.layout.place, rank.tensors)}
    return sum(prod(checkpoint.dims.slot_shape(place)) for place in places)


def _optimizer(checkpoint: Checkpoint) -> str:
    if is_unified(checkpoint.folder):
        return "whole tensors (unified checkpoint)"
    files = [name for name in checkpoint.left_out if STATE_FILES.fullmatch(name) and name.endswith(".pdopt")]
    return f"{len(files)} .pdopt file{'s' * (len(files) > 1)}" if files else "none"


def _manifest(folder: Path) -> str:
    there = (folder / MANIFEST).is_file()
    return f"not compared; {commands.line('verify', folder)} compares it" if there else "none"


def _step(folder: Path) -> str:
    return str(read_state(folder).global_step) if (folder / TRAINER_STATE).is_file() else f"no {TRAINER_STATE}"


def _rows(checkpoint: Checkpoint) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("tensor", "shape", "whole shape", "dtype", "file")]
    for rank in checkpoint.ranks.values():
        if rank.tp in (None, 0):
            for name, ref in rank.tensors.items():
                whole = checkpoint.dims.slot_shape(checkpoint.layout.place(name))
                rows.append((name, str(list(ref.shape)), str(list(whole)), ref.dtype, ref.path.name))
    return rows
