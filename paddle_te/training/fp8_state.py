"""The state of delayed scaling in a run's checkpoints, a file for each pipeline stage."""

import logging
from collections.abc import Mapping
from pathlib import Path

from paddle.nn import Layer

from paddle_te import fp8
from paddle_te.fp8.recipe import Recipe
from paddle_te.host import HostArguments, HostConfig
from paddle_te.models.decoder import recipe_of

logger = logging.getLogger(__name__)


def scaled_recipe(config: HostConfig) -> Recipe | None:
    """Return the fp8 recipe of a decoder's configuration, if it has a state to keep; None otherwise."""
    recipe = recipe_of(config)
    return recipe if recipe and recipe.kind == "delayed" else None


def tell_fp8_attention(config: HostConfig, args: HostArguments) -> None:
    """Warn, in the job's first process, that training with attention in fp8 may not last."""
    recipe = recipe_of(config)
    if recipe is not None and recipe.fp8_dpa and args.process_index == 0:
        logger.warning(
            "fp8_dpa: with attention in fp8 the loss of a Llama of 130 M parameters went up for good after 36 to 112 "
            "million tokens; leave fp8_dpa out of long runs (docs/background/fp8.md#attention-in-fp8)"
        )


def save(
    folder: str | Path, model: Layer, recipe: Recipe, args: HostArguments, names: Mapping[str, str] | None
) -> None:
    """Write this stage's state into a checkpoint: within a stage all ranks share amax, and so have the same scales.

    Collective. args: the host's TrainingArguments. names: of the stage's layers in the whole model.
    """
    fp8.reduce_amax(model, recipe)
    if args.dataset_rank == 0 and getattr(args, "sequence_rank", 0) == 0 and args.tensor_parallel_rank <= 0:
        stage = max(args.pipeline_parallel_rank, 0)
        fp8.save(Path(folder) / f"fp8_state.pp{stage:02d}.pdparams", model, recipe, names)
