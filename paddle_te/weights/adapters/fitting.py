"""Check that an adapter is for a model: every tensor has a place there, and no module that it names is left out."""

from dataclasses import replace

from paddle_te.weights.adapters.files import Adapter, LowRank, all_parts
from paddle_te.weights.adapters.settings import Targets
from paddle_te.weights.dims import Dims
from paddle_te.weights.folder import Checkpoint
from paddle_te.weights.layout import Part
from paddle_te.weights.tensors import CheckpointError


def with_adapter(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return the checkpoint as one whose weights have the adapter in them: whoever reads them reads them merged.

    Raises CheckpointError for the adapter of another model.
    """
    check_fits(adapter, checkpoint.dims, str(checkpoint.folder), checkpoint.tied)
    return replace(checkpoint, adapter=adapter)


def check_fits(adapter: Adapter, dims: Dims, model: str, tied: bool) -> None:
    """Raise CheckpointError unless an adapter is one of a model.

    model: what to call it in messages. tied: whether its head is its embedding.
    """
    for part, low_rank in adapter.parts.items():
        _check_layer(adapter, low_rank.name, part, dims, model)
        _check_tied(adapter, low_rank.name, part.name, tied)
    for part, whole in adapter.whole.items():
        _check_layer(adapter, whole.name, part, dims, model)
        _check_tied(adapter, whole.name, part.name, tied)
    for low_ranks in adapter.low_ranks().values():
        for low_rank in low_ranks:
            _check_shape(adapter, low_rank, dims, model)
    for ref, place, name in adapter.whole.values():
        if tuple(ref.shape) != dims.slot_shape(place):
            raise CheckpointError(
                f"{ref.path}: {name!r} has shape {list(ref.shape)}, in {model} {list(dims.slot_shape(place))}: the "
                "adapter of another model, or of one whose vocabulary was changed"
            )
    if adapter.settings.targets:
        _check_targets(adapter, adapter.settings.targets, dims)


def _check_layer(adapter: Adapter, name: str, part: Part, dims: Dims, model: str) -> None:
    if part.layer is not None and part.layer >= dims.num_hidden_layers:
        raise CheckpointError(
            f"{adapter.folder}: the adapter of another model: it has {name!r}, and {model} has "
            f"{dims.num_hidden_layers} layers"
        )


def _check_tied(adapter: Adapter, name: str, part: str, tied: bool) -> None:
    if tied and part in ("embed", "lm_head"):
        raise CheckpointError(
            f"{adapter.folder}: changes {name!r}, which with tie_word_embeddings=true is embedding and head in one: "
            "merge it with PEFT, and save the model with tie_word_embeddings=false"
        )


def _check_shape(adapter: Adapter, low_rank: LowRank, dims: Dims, model: str) -> None:
    shapes = [dims.part_shape(part) for part in dims.parts(low_rank.place)]
    wanted = [sum(shape[0] for shape in shapes), shapes[0][1]]
    if (found := [low_rank.out_features, low_rank.in_features]) != wanted:
        raise CheckpointError(
            f"{adapter.folder}: the adapter of another model: {low_rank.name!r} is a weight {found} there, and "
            f"{wanted} in {model}"
        )


def _check_targets(adapter: Adapter, targets: Targets, dims: Dims) -> None:
    """Check that the modules that PEFT's target_modules name have A and B, and no others."""
    settings = adapter.settings
    for module, place in all_parts(adapter.form, dims.spec):
        wanted = targets.match(module) and not any(f".{name}." in f".{module}." for name in settings.saved)
        if wanted != (dims.parts(place)[0] in adapter.parts):
            found = "has no A and B in the file" if wanted else "has A and B in the file, and is not among them"
            raise CheckpointError(f"{settings.path}: of its target_modules {module!r} {found}")
    names = {name for _, _, name in adapter.whole.values()}
    for module in settings.saved:
        if not any(f".{module}." in f".{name}" for name in names):
            raise CheckpointError(f"{settings.path}: modules_to_save names {module!r}, which is not in the file")
