"""Where the reference's log-probabilities of a batch's answers come from."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from paddle_te.distributed import gather_objects
from paddle_te.host import HostModel, HostTrainer
from paddle_te.hosts.paddlenlp.training.preference_datasets import GOOD, LENGTHS, MEMBERS, PRESENT, REFERENCE, Rows
from paddle_te.outputs import write_file
from paddle_te.runs.heartbeat import EVALUATING, Heartbeat

logger = logging.getLogger(__name__)

FOLDER = "reference_log_probs"  # in output_dir
OF_ANSWERS = (MEMBERS, LENGTHS, PRESENT, GOOD, REFERENCE)


Inputs = dict[str, Any]  # a batch of `PreferenceCollator`


class Reference(Protocol):
    """What answers are compared with."""

    def log_probabilities(self, model: HostModel, inputs: Inputs) -> Tensor:
        """Return those of the first and the second answer of each pair, float32 [2, m], without gradients.

        model: the one that is trained.
        """


def log_probabilities(model: HostModel, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return those that a model gives to a batch's answers, float32 [m] of the first and of the second ones."""
    outputs = model(**{name: value for name, value in inputs.items() if name not in OF_ANSWERS})
    tokens = outputs[0] if isinstance(outputs, tuple) else outputs
    first, second = inputs[MEMBERS].unbind(0)
    return (first * tokens).sum(-1), (second * tokens).sum(-1)


class NoReference:
    """Give all answers the same probability."""

    def log_probabilities(self, model: HostModel, inputs: Inputs) -> Tensor:
        return paddle.zeros_like(inputs[LENGTHS])


class Computed:
    """Take what was computed before training from the batch."""

    def log_probabilities(self, model: HostModel, inputs: Inputs) -> Tensor:
        return inputs[REFERENCE]


class OwnWeights:
    """Compute with the weights that the model began with, of which there is no second copy.

    They are those under its adapter, or all of them before it is trained.
    """

    def __init__(self, model: HostModel) -> None:
        self._all = model.sublayers(include_self=True)
        self._adapted = [layer for layer in self._all if hasattr(layer, "disable_lora") and layer is not model]

    def log_probabilities(self, model: HostModel, inputs: Inputs) -> Tensor:
        with paddle.no_grad(), self._off():
            return paddle.stack(log_probabilities(model, inputs))

    @contextlib.contextmanager
    def _off(self) -> Iterator[None]:
        """Set attributes directly: model.eval() and train() walk through all layers, which takes milliseconds."""
        modes = [layer.training for layer in self._all]
        for layer in self._all:
            layer.__dict__["training"] = False
        for layer in self._adapted:
            layer.__dict__["disable_lora"] = True
        try:
            yield
        finally:
            for layer in self._adapted:
                layer.__dict__["disable_lora"] = False
            for layer, mode in zip(self._all, modes, strict=True):
                layer.__dict__["training"] = mode


class SecondModel:
    """Compute with a model of its own, whose weights are not trained."""

    def __init__(self, model: HostModel) -> None:
        model.eval()
        for weight in model.parameters():
            weight.stop_gradient = True
        self.model = model

    def log_probabilities(self, model: HostModel, inputs: Inputs) -> Tensor:
        with paddle.no_grad():
            return paddle.stack(log_probabilities(self.model, inputs))

    def take_weights(self, model: HostModel) -> None:
        """Take the weights of a model with the same layers."""
        with paddle.no_grad():
            for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                paddle.assign(theirs, mine)


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
    args, beat = trainer.args, Heartbeat().beat
    ranks, rank = max(args.dataset_world_size, 1), max(args.dataset_rank, 0)
    found = np.full([len(rows.pairs), 2], np.nan, np.float32)
    for first in range(0, len(rows), ranks):
        number = first + rank
        batch = trainer.data_collator([rows[min(number, len(rows) - 1)]])
        inputs = {name: paddle.to_tensor(value) for name, value in batch.items() if isinstance(value, np.ndarray)}
        with trainer.autocast_smart_context_manager():
            values = reference.log_probabilities(trainer.model, inputs).numpy().T
        if number < len(rows):
            found[rows.packs[number]] = values
        beat(EVALUATING)
    return np.fmax.reduce(np.stack(gather_objects(found, args.world_size)))
