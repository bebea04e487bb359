"""Going on from a checkpoint that was saved in other degrees of parallelism, or as a unified one.

PaddleNLP loads a checkpoint whose files are this run's own, rank by rank. Every other one is read here, straight from
its files: each rank takes the weights and the optimizer's state that it holds in this run, in the way in which its
optimizer holds them. Nothing is written, so nothing can be left behind or seen half-done, and what cannot be read whole
is refused before a weight is changed.
"""

import logging
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor
from paddlenlp.trainer.trainer_utils import OptimizerNames

from paddle_te import manifest
from paddle_te.folders import PADDLE_ADAPTER_WEIGHTS, files_of
from paddle_te.host import HostArguments, HostModel
from paddle_te.hosts.paddlenlp.loading import layout_of, load_weights, read_share
from paddle_te.optimizer.holding import held_by, layers_of
from paddle_te.options.training import UPDATED_HERE
from paddle_te.runs.checkpoints import is_complete
from paddle_te.weights import CheckpointError, Degrees
from paddle_te.weights.blocks import BLOCK, pack
from paddle_te.weights.folder import Checkpoint, variant
from paddle_te.weights.layout import SPLIT_AXIS, Layout
from paddle_te.weights.opened import opened
from paddle_te.weights.optimizer import ADAMS, MASTER, MOMENTS, POWERS, kept_how
from paddle_te.weights.resharding import check_reshardable, saved_degrees

logger = logging.getLogger(__name__)

_HALF = (paddle.bfloat16, paddle.float16)


def check_resumable(folder: str | Path, args: HostArguments) -> None:
    """Refuse a checkpoint from which training cannot go on with these TrainingArguments.

    Reads names and shapes only. Raises CheckpointError, a ValueError: for one that is not whole, that cannot be divided
    by this run's degrees, or that was saved in another precision or with another kind of optimizer's state.
    """
    checkpoint = open_share(folder, args)
    with_optimizer = not args.ignore_load_lr_and_optim
    if with_optimizer and _is_updated_here(args):
        _check_kept_alike(Path(folder), args)
    if checkpoint is None:
        return
    check_reshardable(checkpoint, degrees_of(args), max(args.virtual_pp_degree, 1), with_optimizer=with_optimizer)
    theirs = _dtype(checkpoint)
    if with_optimizer and theirs != args.model_dtype:
        raise CheckpointError(
            f"{checkpoint.folder}: its weights are {theirs}, this run's {args.model_dtype}: resume in the precision in "
            f"which it was saved, or start from its weights with --te_init_weight_path {checkpoint.folder}"
        )


def _check_kept_alike(folder: Path, args: HostArguments) -> None:
    for flag, saved in kept_how(folder).items():
        asked = getattr(args, flag)
        if saved != (mine := getattr(asked, "value", asked)):  # PaddleNLP's has an enumeration of optimizers
            raise CheckpointError(
                f"{folder}: its optimizer's state was saved with --{flag} {saved}, and this run has --{flag} {mine}: "
                f"resume with --{flag} {saved}, or start from its weights with --te_init_weight_path {folder}"
            )


def degrees_of(args: Any) -> Degrees:
    """Return the Degrees of a run with these TrainingArguments."""
    kinds = ("tensor", "pipeline", "sharding", "expert")
    return Degrees(*(max(getattr(args, f"{kind}_parallel_degree", 1), 1) for kind in kinds))


def open_share(folder: str | Path, args: HostArguments, layout: Layout | None = None) -> Checkpoint | None:
    """Return the Checkpoint in a folder where each rank reads its share of it here; None where PaddleNLP loads it.

    layout: of this run's weights; None: the checkpoint's. Raises CheckpointError for a folder that neither can load
    whole.
    """
    folder = Path(folder)
    if _is_adapter(folder) or _is_paddlenlps_own(args):
        _check_own_files(folder, args)
        if layout and not _is_adapter(folder) and opened(folder).checkpoint.layout != layout:
            raise CheckpointError(f"{folder}: the other backend's weights are translated with AdamW's state only")
        return None
    if args.unified_checkpoint and "".join(args.unified_checkpoint_config) and args.world_size > 1:
        return None  # it was saved without this or that, and PaddleNLP knows what stands in for it
    checkpoint = opened(folder).checkpoint
    # stages 1 and 2, and stage 1 with and without split_param, divide differently, which files' names do not tell
    undivided = args.sharding_parallel_degree <= 1
    own = undivided and saved_degrees(checkpoint) == degrees_of(args) and layout in (None, checkpoint.layout)
    return None if own and not args.offload_optimizer else checkpoint  # PaddleNLP would load all states on the device


def broken_state(folder: str | Path, args: HostArguments) -> list[str]:
    """Return [why] where the states of AdamW in a whole model's checkpoint do not belong to its weights; else []."""
    folder = Path(folder)
    partly = args.unified_checkpoint and "".join(args.unified_checkpoint_config)
    if args.ignore_load_lr_and_optim or partly or _is_adapter(folder) or _is_paddlenlps_own(args):
        return []
    if not any(folder.glob("optimizer*")):
        return []  # `check_fits` tells what to do
    try:
        opened(folder).optimizer  # noqa: B018 (whose files are compared as it is made)
    except CheckpointError as error:
        return [str(error)]
    return []


def _is_adapter(folder: Path) -> bool:
    return bool(files_of(folder, PADDLE_ADAPTER_WEIGHTS))


def _is_paddlenlps_own(args: HostArguments) -> bool:
    """Return whether only PaddleNLP knows how the optimizer's state is laid out."""
    fused = "enable_stage1_tensor_fusion" in (args.sharding_parallel_config or "")
    return fused or not _is_updated_here(args)


def _is_updated_here(args: HostArguments) -> bool:
    return args.optim in (OptimizerNames.ADAMW, *UPDATED_HERE)


def _check_own_files(folder: Path, args: HostArguments) -> None:
    """Raise CheckpointError unless the files are those that this run itself would save."""
    degrees = degrees_of(args)
    unified = [path.name for stem in ("model", "peft_model", "optimizer") for path in folder.glob(f"{stem}-*-of-*")]
    there = {path.name for path in folder.glob("optimizer*.pdopt")}
    tps, pps = (range(n) if n > 1 else [None] for n in (degrees.tensor_parallel, degrees.pipeline_parallel))
    shards = [f"shard{n:02d}" for n in range(degrees.sharding)] if degrees.sharding > 1 else [""]
    names = ("_".join(filter(None, (variant(tp, pp), shard))) for tp, pp, shard in product(tps, pps, shards))
    wanted = {".".join(filter(None, ("optimizer", name, "pdopt"))) for name in names}
    several = args.world_size == 1 and any("-of-00001" not in name for name in unified)
    if several or there and there != wanted:
        found = sorted(there) or sorted(unified)
        raise CheckpointError(
            f"{folder} was saved in another layout of processes (it has {', '.join(found)}), and only whole models "
            "trained by AdamW are resharded: resume it in the layout in which it was saved"
        )


def _dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype of the matrices; norms may have another."""
    tensors = next(iter(checkpoint.ranks.values())).tensors
    places = ((ref, checkpoint.layout.place(name)) for name, ref in tensors.items())
    return next(ref.dtype for ref, place in places if SPLIT_AXIS[place.slot.parts[0]] is not None)


def _saved_how(checkpoint: Checkpoint) -> str:
    """Return its layout, for the log; of a unified checkpoint only a manifest knows it."""
    if saved := saved_degrees(checkpoint):
        return f"its layout is {saved}"
    written = manifest.read(checkpoint.folder) if is_complete(checkpoint.folder) else None
    if written is None or not written.run.get("layout"):
        return "a unified checkpoint, of whole tensors"
    return f"a unified checkpoint whose layout was {degrees_of(SimpleNamespace(**written.run['layout']))}"


class Share:
    """This rank's share of a Checkpoint, for a model that is not wrapped yet."""

    def __init__(self, checkpoint: Checkpoint, model: HostModel) -> None:
        self._checkpoint, self._model = checkpoint, model
        self._parameters = model.state_dict()  # stage 3 takes their values away, but not their names

    @classmethod
    def find(cls, folder: str | Path | None, model: HostModel, args: HostArguments) -> Self | None:
        """Return the Share of a checkpoint folder; None where PaddleNLP loads it. Raise CheckpointError."""
        if not folder or not hasattr(model.config, "num_hidden_layers"):
            return None
        config = model.config
        checkpoint = open_share(folder, args, layout_of(config))
        if checkpoint is None:
            return None
        if args.process_index == 0:
            other = f", in {checkpoint.layout.title} layout" * (checkpoint.layout != layout_of(config))
            logger.info(
                f"resuming {folder}: {_saved_how(checkpoint)}{other}; this run's layout is {degrees_of(args)}, and "
                "each rank reads its share"
            )
        return cls(checkpoint, model)

    def load_weights(self) -> None:
        """Give the model its weights. Raise CheckpointError."""
        load_weights(self._model, self._checkpoint)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return what `optimizer.state_dict()` would have been on this rank. Raise CheckpointError.

        optimizer: the outermost one, wrapped, before its first step.
        """
        before = optimizer.state_dict()
        masters = before.get("master_weights", {})  # stages 2 and 3 have made theirs, under names of their own
        held = held_by(optimizer, self._parameters.values())
        trained = {name: p for name, p in self._parameters.items() if not p.stop_gradient}
        mine = {name: held[p.name] for name, p in trained.items() if p.name in held}
        half = {name for name in mine if self._parameters[name].dtype in _HALF}
        called = {name: mine[name].name for name in mine}
        for name in half:
            made = masters.get(mine[name].name)
            called[name] = f"{mine[name].name}_fp32_master_0" if made is None else made.name
        state = {key: before[key] for key in ("LR_Scheduler",) if key in before}
        by_muon = getattr(layers_of(optimizer)[-1], "matrices", ())
        offloads = getattr(layers_of(optimizer)[-1], "host_states", None) is not None
        place = paddle.CPUPlace() if offloads else None
        kinds = opened(self._checkpoint.folder).optimizer
        for kind in MOMENTS + POWERS:
            names = [name for name in mine if kind not in ADAMS or self._parameters[name].name not in by_muon]
            for name, array in self._read(kinds[kind], names, kind in POWERS):
                key = f"{called[name]}_{kind}"
                if kind not in POWERS:
                    array = self._moment(mine[name].share(array), name)
                state[key] = _tensor(array, key, place)
        if half:
            if MASTER not in kinds:
                raise CheckpointError(f"{self._checkpoint.folder}: has no master weights")
            state["master_weights"] = {
                mine[name].name: _tensor(mine[name].share(array), called[name], place)
                for name, array in self._read(kinds[MASTER], half)
            }
        return state

    def _moment(self, array: NDArray[Any], name: str) -> NDArray[Any]:
        """Return what the optimizer keeps of a moment; in 8 bits it divides the elements into blocks."""
        if array.dtype != np.uint64:
            return array
        try:
            return pack(array)
        except ValueError:
            raise CheckpointError(
                f"{self._checkpoint.folder}: --optim_moments int8 keeps {name!r} in blocks of {BLOCK} elements, which "
                "this run's layout would cut: resume in the layout in which it was saved"
            ) from None

    def _read(
        self, checkpoint: Checkpoint, names: Iterable[str], numbers: bool = False
    ) -> Iterable[tuple[str, NDArray[Any]]]:
        return read_share(checkpoint, self._model.config, names, numbers)


def _tensor(array: NDArray[Any], name: str, place: Any) -> Tensor:
    tensor = paddle.to_tensor(np.ascontiguousarray(array), place=place)
    tensor.name = name
    return tensor
