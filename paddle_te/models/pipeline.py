"""What decoder layers of every host are in a pipeline: what travels between stages, and names in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_te import fp8
from paddle_te.distributed import recompute
from paddle_te.models.decoder import MicroBatches
from paddle_te.ops.kept import copy_with_kept

FLASH_MASK = "attn_mask_startend_row_indices"  # the hosts' name for where the documents of a packed sequence end


def _by_name(tensors: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """Return {name: tensor} of what travels with hidden_states in a host's pipelines, in its order.

    The hosts leave out what is None, so that only dtypes tell what is there. Raises NotImplementedError for others.
    """
    names = {paddle.int32: FLASH_MASK, paddle.int64: "position_ids"}
    found: dict[str, Tensor] = {}
    there = [tensor for tensor in tensors if tensor is not None]
    for tensor in there:
        name = "attention_mask" if tensor.is_floating_point() else names.get(tensor.dtype)
        if name is None or name in found:
            raise NotImplementedError(
                f"pipelines of backends pd and te do not take {[str(t.dtype) for t in there]} beside hidden_states, "
                "only an additive attention_mask, int32 attn_mask_startend_row_indices and int64 position_ids"
            )
        tensor.stop_gradient = True
        found[name] = tensor
    return found


class InPipeline:
    """Let arguments travel between stages as a tuple; mixed into a host's decoder layer of ours.

    The layer takes them by their names, with is_first_microbatch, and says in `recomputes_whole` whether backward
    computes all of it again.
    """

    training: bool
    recomputes_whole: Callable[[], bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._micro_batches = MicroBatches()

    def forward(self, args: Tensor | tuple[Tensor, *tuple[Tensor | None, ...]]) -> Tensor | tuple[Tensor, ...]:
        """Compute the layer.

        args: hidden_states, or a tuple of them with any of additive attention_mask [b, 1, s, s], int32
        attn_mask_startend_row_indices [b, 1, s] and int64 position_ids [b, s] -> the same of the output.

        Raises NotImplementedError for what else a host's tuple may hold.
        """
        hidden_states, *others = args if isinstance(args, tuple) else (args,)
        named = _by_name(others)
        first = self._micro_batches.is_first(self.training)
        run = super().forward  # type: ignore[misc]  # the host's
        if self.recomputes_whole() and not hidden_states.stop_gradient:
            out = recompute(run, hidden_states, is_first_microbatch=first, **named)
        else:
            out = run(hidden_states, is_first_microbatch=first, **named)
        # copies, because a pipeline lets go of what a stage has sent
        return (out, *map(copy_with_kept, named.values())) if named else out


def stage_layer_names(model: nn.Layer) -> dict[str, str]:
    """Return {name of a layer on this pipeline stage: its name in the whole model}; {} for a model without stages.

    fp8 state is saved under the latter, so that a run with other stages can read it.
    """
    model.state_dict()  # makes the mapping, in both hosts
    weights = getattr(model, "_pp_to_single_mapping", None) or {}
    return {name: _whole_name(name, weights) for name in fp8.name_modules(model)} if weights else {}


def _whole_name(name: str, weights: Mapping[str, str]) -> str:
    """Return what the whole model calls a layer of a stage.

    weights: {a weight's name on the stage: its name in the whole model}. A layer without weights, such as attention,
    is found by those of the layers around it. Raises KeyError where these have none either.
    """
    parent = name
    while parent:
        for weight, whole in weights.items():
            if weight.startswith(f"{parent}."):
                return whole.removesuffix(weight.removeprefix(parent)) + name.removeprefix(parent)
        parent = parent.rpartition(".")[0]
    raise KeyError(f"{name}: no weight of this pipeline stage lies in it or in a layer around it")
