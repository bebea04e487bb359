"""Give an adapter's A and B as a model in training has them: the names and share of one tensor parallel rank."""

from collections.abc import Iterator

import numpy as np

from paddle_te.weights.adapters.files import Adapter, LowRank, all_parts
from paddle_te.weights.adapters.names import Form
from paddle_te.weights.contents import merge_command
from paddle_te.weights.dims import Dims
from paddle_te.weights.layout import Place
from paddle_te.weights.tensors import Array, CheckpointError


def check_trainable(adapter: Adapter) -> None:
    """Raise CheckpointError for an adapter that no training here goes on from: it may be merged."""
    settings, why = adapter.settings, None
    ranks = {low_rank.rank for low_rank in adapter.parts.values()}
    scalings = {low_rank.scaling for low_rank in adapter.parts.values()}
    if adapter.whole:
        why = f"it has {next(name for _, _, name in adapter.whole.values())!r} whole"
    elif any(part.layer is None for part in adapter.parts):
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

    Experts' are [experts, r, in] and [experts, out, r]. Raises CheckpointError where a fused module would need one A
    for parts that have an A each, or are not adapted, and where only some experts of a layer are.
    """
    for name, place in all_parts(form, dims.spec):
        if place.slot.stacked:
            yield from _of_experts(adapter, name, place, dims)
            continue
        first, *others = [adapter.parts.get(part) for part in dims.parts(place)]
        if not any((first, *others)):
            continue
        if first is None or any(other is not first for other in others):
            raise CheckpointError(
                f"{adapter.folder}: {', '.join(place.slot.parts)} have an A each there, or none, and one in {name!r}, "
                "which holds their weights in one: leave fuse_attention_qkv and fuse_attention_ffn out"
            )
        a, b = _share(first, place, dims, degree, rank)
        yield f"{name}.lora_A", np.ascontiguousarray(a.T)
        yield f"{name}.lora_B", np.ascontiguousarray(b.T)


def _of_experts(adapter: Adapter, name: str, place: Place, dims: Dims) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) of the A and B of all experts of a layer, if they have any."""
    parts = dims.parts(place)
    low_ranks = [adapter.parts[part] for part in parts if part in adapter.parts]
    if not low_ranks:
        return
    if len(low_ranks) < len(parts):
        raise CheckpointError(
            f"{adapter.folder}: has A and B beside {len(low_ranks)} of the {len(parts)} experts that {name!r} is of, "
            "and LoRA here is beside all: merge it into its model first: " + merge_command(adapter.folder)
        )
    yield f"{name}.lora_A", np.stack([low_rank.read_a() for low_rank in low_ranks])
    yield f"{name}.lora_B", np.stack([low.read_b(part, dims) for low, part in zip(low_ranks, parts, strict=True)])


def _share(low_rank: LowRank, place: Place, dims: Dims, degree: int, rank: int) -> tuple[Array, Array]:
    shares = {part: dims.share(part, degree, rank) for part in dims.parts(place)}
    columns = next(iter(shares.values()))[1]
    rows = {part: low_rank.read_b(part, dims)[share[0]] for part, share in shares.items()}
    return low_rank.read_a()[:, columns], dims.put_together(place, rows)
