"""Where the reference's log-probabilities of a batch's answers come from."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle import Tensor
from paddle.distributed.fleet.meta_parallel import PipelineLayer, PipelineParallel

from paddle_te.distributed import gather_objects, sequence_group
from paddle_te.host import HostModel, HostTrainer
from paddle_te.hosts.paddlenlp.training.preference_datasets import GOOD, LENGTHS, MEMBERS, PRESENT, REFERENCE, Rows
from paddle_te.hosts.paddlenlp.training.preference_pipeline import in_pipeline, token_log_probabilities
from paddle_te.layers.lora import LowRank, WithLoRA
from paddle_te.layers.moe.lora import GroupedLowRanks
from paddle_te.outputs import write_file
from paddle_te.runs.heartbeat import EVALUATING, Heartbeat

logger = logging.getLogger(__name__)

FOLDER = "reference_log_probs"  # in output_dir
OF_ANSWERS = (MEMBERS, LENGTHS, PRESENT, GOOD, REFERENCE)


Inputs = dict[str, Any]  # a batch of `PreferenceCollator`


class Reference(Protocol):
    """What answers are compared with."""

    def log_probabilities(self, model: HostModel, batches: Sequence[Inputs]) -> list[Tensor]:
        """Return those of the first and the second answer of each batch's pairs, float32 [2, m], without gradients.

        In a pipeline [] but on the last stage. model: the one that is trained.
        """


def of_the_model(inputs: Inputs) -> Inputs:
    """Return what a model takes of a batch."""
    return {name: value for name, value in inputs.items() if name not in OF_ANSWERS}


def of_answers(inputs: Inputs, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of tokens' log-probabilities [n] over a batch's answers, [m] of the first and the second ones.

    They are sums over the ranks that share sequences, too.
    """
    sums = (inputs[MEMBERS] * tokens).sum(-1)
    if (sharing := sequence_group()) is not None:
        others = sums.detach().clone()  # each rank's gradient is that of its own tokens
        dist.all_reduce(others, group=sharing)
        sums = sums + (others - sums.detach())
    first, second = sums.unbind(0)
    return first, second


def log_probabilities(model: HostModel, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return those that a model gives to a batch's answers, float32 [m] of the first and of the second ones."""
    outputs = model(**of_the_model(inputs))
    return of_answers(inputs, outputs[0] if isinstance(outputs, tuple) else outputs)


def score(model: HostModel, batches: Sequence[Inputs]) -> list[Tensor]:
    """Return `log_probabilities` of each batch, float32 [2, m]; in a pipeline without gradients, on the last stage."""
    if not isinstance(model, PipelineParallel):
        return [paddle.stack(log_probabilities(model, inputs)) for inputs in batches]
    found = token_log_probabilities(model, [of_the_model(inputs) for inputs in batches])
    return [paddle.stack(of_answers(*each)) for each in zip(batches, found, strict=False)]


class NoReference:
    """Give all answers the same probability."""

    def log_probabilities(self, model: HostModel, batches: Sequence[Inputs]) -> list[Tensor]:
        return [paddle.zeros_like(inputs[LENGTHS]) for inputs in batches]


class Computed:
    """Take what was computed before training from the batch."""

    def log_probabilities(self, model: HostModel, batches: Sequence[Inputs]) -> list[Tensor]:
        return [inputs[REFERENCE] for inputs in batches]


class OwnWeights:
    """Compute with the weights that the model began with, of which there is no second copy.

    They are those under its adapter, or all of them before it is trained. Adapters of our layers give nothing, but are
    computed: without them te would take other kernels, whose rounding in fp8 is larger than early rewards.
    """

    def __init__(self, model: HostModel) -> None:
        self._all = model.sublayers(include_self=True)
        self._ours = [layer for layer in self._all if isinstance(layer, (GroupedLowRanks, LowRank))]
        hosts = [layer for layer in self._all if hasattr(layer, "disable_lora") and layer is not model]
        self._hosts = [layer for layer in hosts if not isinstance(layer, WithLoRA)]

    def log_probabilities(self, model: HostModel, batches: Sequence[Inputs]) -> list[Tensor]:
        with paddle.no_grad(), self._off():
            return score(model, batches)

    @contextlib.contextmanager
    def _off(self) -> Iterator[None]:
        """Set attributes directly: model.eval() and train() walk through all layers, which takes milliseconds."""
        modes, scalings = [layer.training for layer in self._all], [layer.scaling for layer in self._ours]
        for layer in self._all:
            layer.__dict__["training"] = False
        for layer in self._ours:
            layer.__dict__["scaling"] = 0.0
        for layer in self._hosts:
            layer.__dict__["disable_lora"] = True
        try:
            yield
        finally:
            for layer in self._hosts:
                layer.__dict__["disable_lora"] = False
            for layer, scaling in zip(self._ours, scalings, strict=True):
                layer.__dict__["scaling"] = scaling
            for layer, mode in zip(self._all, modes, strict=True):
                layer.__dict__["training"] = mode


class SecondModel:
    """Compute with a model of its own, whose weights are not trained."""

    def __init__(self, model: HostModel) -> None:
        model.eval()
        for weight in model.parameters():
            weight.stop_gradient = True
        self.model = model

    def log_probabilities(self, model: HostModel, batches: Sequence[Inputs]) -> list[Tensor]:
        with paddle.no_grad():
            return score(self.model, batches)

    def take_weights(self, model: HostModel) -> None:
        """Take the weights of a model with the same layers, and its buffers: routers keep the bias of experts there."""
        mine, theirs = ([*each.parameters(), *each.buffers()] for each in (self.model, model))
        with paddle.no_grad():
            for own, other in zip(mine, theirs, strict=True):
                paddle.assign(other, own)


def precompute(
    trainer: HostTrainer,
    reference: Reference,
    datasets: Mapping[str, Rows | None],
    identity: Callable[[str], dict[str, Any]],
) -> None:
    """Give Rows the reference's log-probabilities, from the files in output_dir, or computed now and kept there.

    datasets: {name of a split: Rows or None}. identity(split): {name: value} of all that they depend on. All ranks call
    it, before anything is trained. Raises ValueError for a file of other rows.
    """
    args = trainer.args
    for split, rows in datasets.items():
        if rows is None:
            continue
        path = Path(args.output_dir, FOLDER, f"{split}.json")
        depends = identity(split)
        known = gather_objects(_read(path, depends, rows), args.world_size)[0]
        if known is None:
            known = _compute(trainer, reference, rows).tolist()
            if args.process_index == 0:
                said = {"of": depends, "log_probs": known}
                write_file("--precompute_ref_log_probs", path, json.dumps(said))
                logger.info(f"{path}: the reference's log-probabilities of {len(known)} pairs")
        rows.reference = np.asarray(known, np.float32)


def _read(path: Path, identity: Mapping[str, Any], rows: Rows) -> list[list[float]] | None:
    if not path.is_file():
        return None
    said = json.loads(path.read_text())
    if said["of"] != identity or len(said["log_probs"]) != len(rows.pairs):
        raise ValueError(
            f"{path}: these log-probabilities are of other data or another model: remove the file, or take another "
            "--output_dir"
        )
    found: list[list[float]] = said["log_probs"]
    return found


def _compute(trainer: HostTrainer, reference: Reference, rows: Rows) -> NDArray[np.float32]:
    """Return float32 [pairs, 2], of which each rank that reads other data computes its share of the rows."""
    args, beat, model = trainer.args, Heartbeat().beat, in_pipeline(base_of(trainer.model))
    ranks, rank = max(args.dataset_world_size, 1), max(args.dataset_rank, 0)
    found = np.full([len(rows.pairs), 2], np.nan, np.float32)
    together = args.gradient_accumulation_steps if isinstance(model, PipelineParallel) else 1
    for first in range(0, len(rows), ranks * together):
        numbers = [first + each * ranks + rank for each in range(together)]
        batches = [trainer.data_collator([rows[min(number, len(rows) - 1)]]) for number in numbers]
        inputs = [{name: paddle.to_tensor(v) for name, v in b.items() if isinstance(v, np.ndarray)} for b in batches]
        inputs = [trainer._own_tokens(each) for each in inputs]
        with trainer.autocast_smart_context_manager():
            values = reference.log_probabilities(model, inputs)
        for number, each in zip(numbers, values, strict=False):  # none but on a pipeline's last stage
            if number < len(rows):
                found[rows.packs[number]] = each.numpy().T
        beat(EVALUATING)
    return np.fmax.reduce(np.stack(gather_objects(found, args.world_size)))


def base_of(model: HostModel) -> HostModel:
    """Return the pipeline in a LoRAModel; another model as it is."""
    base = getattr(model, "model", None)
    return base if isinstance(base, PipelineLayer) else model
