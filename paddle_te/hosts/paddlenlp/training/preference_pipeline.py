"""Log-probabilities of answers where a model is divided over the stages of a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer, PipelineParallel

from paddle_te.host import HostModel

Inputs = dict[str, Any]  # what a model takes of a batch of `preference_datasets.PreferenceCollator`


def in_pipeline(model: HostModel) -> HostModel:
    """Return the stage of a pipeline as what runs it; another model as it is. All processes call it."""
    return fleet.distributed_model(model) if isinstance(model, PipelineLayer) else model


def take_losses(model: PipelineParallel, take: Callable[[Tensor], Tensor]) -> None:
    """Let the last stage make the loss of each micro-batch's log-probabilities with `take`, from now on."""
    model._layers._loss_fn[0].take = take


def token_log_probabilities(model: PipelineParallel, batches: Sequence[Inputs]) -> list[Tensor]:
    """Return what the model gives to the labels of each batch, float32 [n]; [] but on the last stage.

    No gradients. All stages call it.
    """
    found: list[Tensor] = []

    def keep(tokens: Tensor) -> Tensor:
        found.append(tokens)
        return paddle.zeros([])

    filled = [*batches, *[batches[-1]] * (_least_micro_batches(model) - len(batches))]
    kept, model.accumulate_steps = model.accumulate_steps, len(filled)
    take_losses(model, keep)
    helper: Any = model._p2p_helper
    helper.clear_meta_cache()  # training's tensors have gradients
    try:
        model.eval_batch(model._layers._prepare_pipeline_inputs_func([dict(batch) for batch in filled]), True)
    finally:
        model.accumulate_steps = kept
        helper.clear_meta_cache()
    return found[: len(batches)]


def _least_micro_batches(model: PipelineParallel) -> int:
    """Return how many micro-batches Paddle's schedule of virtual stages asks for."""
    return 2 * model.num_stages if model._layers.get_num_virtual_stages() > 1 else 1
