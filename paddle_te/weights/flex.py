"""What PaddleFormers' Trainer resumes from: Paddle's flex_checkpoint, of one rank that holds whole tensors.

A folder each for the weights, AdamW's moments and the master weights. In each 0_0.distcp is what paddle.save makes of
{name: tensor}, and 0.metadata a pickle of Paddle's classes that says of each tensor where it lies in the whole one
(paddle/distributed/flex_checkpoint/dcp/metadata.py). trainer_state.bin is a pickle of PaddleFormers' TrainerState. No
class of theirs is imported: the pickles are written instruction by instruction.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from paddle_te.weights import pdparams
from paddle_te.weights.folder import Checkpoint
from paddle_te.weights.layout import Layout, Slot
from paddle_te.weights.layouts import native_layout, te_layout
from paddle_te.weights.optimizer import MASTER, MOMENTS, POWERS
from paddle_te.weights.output_files import Entry, OutputFile, Target, plan_new_ranks
from paddle_te.weights.tensors import CheckpointError, TensorSpec

WEIGHTS, STATE, MASTERS = "model_state", "optimizer_state", "master_weight"
SUFFIX = ".distcp"
_FILE, _METADATA = f"0_0{SUFFIX}", "0.metadata"
_PADDLES = "paddle.distributed.flex_checkpoint.dcp.metadata"
TRAINER_STATE, SIGNAL = "trainer_state.bin", "saved_signal_0"
_TRAINER_STATE = "paddleformers.trainer.trainer_callback", "TrainerState"
# PaddleNLP's TrainerState has the same
_TRAINER_FIELDS = (
    "epoch global_step consumed_samples max_steps num_train_epochs total_flos log_history best_metric "
    "best_model_checkpoint is_local_process_zero is_world_process_zero trial_name trial_params"
).split()


def plan(sources: Mapping[str, Checkpoint], hf: Layout) -> list[list[OutputFile]]:
    """Plan the files of the state of opened checkpoints {kind: Checkpoint}.

    sources: those of `optimizer.open_optimizer` and, with the kind "", of the weights. hf: Hugging Face's Layout of the
    model, whose names all layouts have outside of the layers.
    """
    layouts = _layouts(sources[""].layout, hf)
    kinds = {WEIGHTS: ("",), STATE: MOMENTS + POWERS, MASTERS: (MASTER,)}
    own_masters = {entry.spec.name for entry in _planned(sources[""], layouts.state) if entry.spec.dtype == "float32"}
    groups = []
    for folder, wanted in kinds.items():
        entries = [
            replace(entry, spec=_spec(entry.spec, kind), kind=kind)
            for kind in wanted
            if kind in sources
            for entry in _planned(sources[kind], layouts.state if kind else layouts.weights)
            if not (kind == MASTER and entry.spec.name in own_masters)
        ]
        groups.append([OutputFile(f"{folder}/{_FILE}", 0, entries)])
    return groups


class _Layouts(NamedTuple):
    weights: Layout
    state: Layout  # of the optimizer


def _layouts(source: Layout, hf: Layout) -> _Layouts:
    """Return the Layouts of PaddleFormers' weights and optimizer's state.

    A Layout te gives the layers of the backends paddle and transformer_engine, PaddleNLP's native one those of none.
    Tied weights are saved under both their names, their optimizer's state under the head's.
    """
    family, tied = source.family, all(slot.parts != ("lm_head",) for slot in hf.model)
    layers = te_layout(tied, family) if source.kind == "te" else native_layout(tied=tied, family=family)
    weights = state = hf.model
    if tied:
        embed, *others = hf.model
        head = Slot("lm_head.weight", embed.parts)
        weights, state = (*hf.model, head), (head, *others)
    return _Layouts(*(replace(layers, title="PaddleFormers'", prefix=hf.prefix, model=m) for m in (weights, state)))


def _planned(checkpoint: Checkpoint, layout: Layout) -> list[Entry]:
    """Return the Entries of a Checkpoint's tensors in a Layout."""
    (((file,),), _) = plan_new_ranks(checkpoint, Target(layout, pdparams.SUFFIX, 1, 1))
    return file.entries


def _spec(spec: TensorSpec, kind: str) -> TensorSpec:
    if kind == "":
        return spec
    if spec.dtype != "float32":
        raise CheckpointError(
            f"the optimizer's state has {kind} in {spec.dtype} (--optim_moments, --master_weights); PaddleFormers has "
            "it in float32: save once with a run that resumes with float32"
        )
    if kind == MASTER:
        return replace(spec, name=f"{spec.name}.w_0")
    return replace(spec, name=f"{spec.name}.{kind}", shape=(1,) if kind in POWERS else spec.shape)


def write_metadata(folder: Path, groups: Iterable[Sequence[OutputFile]]) -> None:
    """Write beside each file of `plan` in a folder what is in it."""
    for (file,) in groups:
        path = folder / file.name
        path.with_name(_METADATA).write_bytes(_metadata([entry.spec for entry in file.entries], path.name))


def write_trainer_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a Trainer's state, a dict as in PaddleNLP's trainer_state.json, as PaddleFormers' trainer_state.bin."""
    fields = {name: state[name] for name in _TRAINER_FIELDS if name in state}
    path.write_bytes(_program(_object(*_TRAINER_STATE, fields)))


def _metadata(specs: Sequence[TensorSpec], file: str) -> bytes:
    sizes = {spec.name: tuple(spec.shape) for spec in specs}
    pieces = {
        spec.name: [
            _Object(
                "LocalTensorMetadata",
                global_offset=(0,) * len(spec.shape),
                local_shape=tuple(spec.shape),
                dtype=spec.dtype,
                global_shape=tuple(spec.shape),
                is_flattened=False,
                flattened_range=None,
            )
        ]
        for spec in specs
    }
    places = [
        (
            _Object(
                "LocalTensorIndex",
                tensor_key=name,
                global_offset=(0,) * len(shape),
                is_flattened=False,
                flattened_range=None,
                replica_id=None,
                local_shape=shape,
            ),
            file,
        )
        for name, shape in sizes.items()
    ]
    metadata = _Object(
        "Metadata",
        state_dict_metadata=pieces,
        storage_metadata=_Pairs(places),
        flat_mapping={name: (name,) for name in sizes},
    )
    return _program(_value(metadata))


# ---- pickles, protocol 4


class _Object:
    """One of Paddle's records, by its class's name and its fields."""

    def __init__(self, name: str, **fields: object) -> None:
        self.name, self.fields = name, fields


class _Pairs(list[tuple[_Object, object]]):
    """A dict's items, whose keys are _Objects."""


def _program(value: bytes) -> bytes:
    return pickle.PROTO + b"\x04" + value + pickle.STOP


def _object(module: str, name: str, fields: Mapping[str, object]) -> bytes:
    """Return the program of a dataclass's instance, made without its constructor, which frozen ones need."""
    made = pdparams.pickled_global(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return made + _value(fields) + pickle.BUILD


def _value(value: object) -> bytes:
    """Return the instructions that make a value: plain data, _Objects and _Pairs."""
    if isinstance(value, _Object):
        return _object(_PADDLES, value.name, value.fields)
    if isinstance(value, dict | _Pairs):
        items = value.items() if isinstance(value, dict) else value
        inside = b"".join(_value(key) + _value(item) for key, item in items)
        return pickle.EMPTY_DICT + pickle.MARK + inside + pickle.SETITEMS
    if isinstance(value, list):
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(_value, value)) + pickle.APPENDS
    if isinstance(value, tuple):
        return pickle.MARK + b"".join(map(_value, value)) + pickle.TUPLE
    if isinstance(value, str):
        return pdparams.pickled_text(value)
    if value is None or isinstance(value, bool):
        return {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]
    if isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return pickle.LONG1 + bytes([len(data)]) + data
    if isinstance(value, float):
        return pickle.BINFLOAT + struct.pack(">d", value)
    raise CheckpointError(f"a {type(value).__name__} in a Trainer's state")
