"""Give an adapter's A and B as a model in training has them: the names and share of one tensor parallel rank."""

from collections.abc import Iterator

import numpy as np

from paddle_te.weights import layout as layouts
from paddle_te.weights.adapters.files import Adapter, LowRank
from paddle_te.weights.adapters.names import Form
from paddle_te.weights.contents import merge_command
from paddle_te.weights.layout import Dims, Slot
from paddle_te.weights.tensors import Array, CheckpointError


def check_trainable(adapter: Adapter) -> None:
    """Raise CheckpointError for an adapter that no training here goes on from: it may be merged."""
    settings, why = adapter.settings, None
    ranks = {low_rank.rank for low_rank in adapter.parts.values()}
    scalings = {low_rank.scaling for low_rank in adapter.parts.values()}
    if adapter.whole:
        why = f"it has {next(name for _, _, name in adapter.whole.values())!r} whole"
    elif any(layer is None for layer, _ in adapter.parts):
        why = "it is beside embedding or head, too"
    elif len(ranks | {settings.rank}) > 1 or len(scalings | {settings.scaling}) > 1:
        why = f"its modules have ranks {sorted(ranks)} and scalings {sorted(scalings)}, and LoRA here one of each"
    if why:
        raise CheckpointError(
            f"{adapter.folder}: training does not go on from this adapter: {why}; merge it into its model first: "
            f"{merge_command(adapter.folder)}"
        )


def shares(adapter: Adapter, form: Form, dims: Dims, degree: int = 1, rank: int = 0) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) of the A [in, r] and B [r, out] of a tensor parallel rank, in the names of a Form.

    Raises CheckpointError where a fused module would need one A for parts that have an A each, or are not adapted.
    """
    for layer in sorted({layer for layer, _ in adapter.parts if layer is not None}):
        for slot in form.modules.layer:
            first, *others = [adapter.parts.get((layer, part)) for part in slot.parts]
            if not any((first, *others)):
                continue
            name = form.modules.full_name(layer, slot)
            if first is None or any(other is not first for other in others):
                raise CheckpointError(
                    f"{adapter.folder}: {', '.join(slot.parts)} have an A each there, or none, and one in {name!r}, "
                    "which holds their weights in one: leave fuse_attention_qkv and fuse_attention_ffn out"
                )
            a, b = _share(first, slot, dims, degree, rank)
            yield f"{name}.lora_A", np.ascontiguousarray(a.T)
            yield f"{name}.lora_B", np.ascontiguousarray(b.T)


def _share(low_rank: LowRank, slot: Slot, dims: Dims, degree: int, rank: int) -> tuple[Array, Array]:
    places = {part: dims.share(part, degree, rank) for part in slot.parts}
    columns = places[slot.parts[0]][1]
    rows = {part: low_rank.read_b(part, dims)[places[part][0]] for part in slot.parts}
    return low_rank.read_a()[:, columns], layouts.put_together(slot, rows, dims.head_dim)
