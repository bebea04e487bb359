"""See inside a run in fp8: count every N steps, log it, and let layers leave fp8 that it does not suit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableSequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_te import fp8
from paddle_te.distributed import fp8_group, gather_objects
from paddle_te.fp8.recipe import Recipe
from paddle_te.fp8.statistics import Place, Recorder, Statistics
from paddle_te.host import HostArguments, HostModel
from paddle_te.models.decoder import recipe_of
from paddle_te.models.in_16_bits import compute_in_16_bits, layer_number
from paddle_te.models.pipeline import stage_layer_names
from paddle_te.options.fp8 import LIMITED, SWITCH, Fallback
from paddle_te.runs.fp8_log import FP8_LOG, HEAD, kept_lines, line_of, line_of_switch
from paddle_te.training.callback import Callback, Control, State

logger = logging.getLogger(__name__)

COLUMNS = tuple(each.name for each in fields(Statistics))
# What the train log and the trackers get: the greatest of all tensors
WORST = tuple(f"fp8_{name}" for name in LIMITED)
IN_16_BITS = "in_16_bits"  # what the manifest calls the numbers of the layers that have left fp8
_ATTENTION = ("qkv", "softmax", "output")
_GEMMS = {"layernorm_qkv": "qkv", "layernorm_mlp": "", "mlp": "", "lm_head": ""}  # by the last part of a module's name
Tensors = dict[str, Statistics]


def tensor_name(place: Place, whole: Mapping[str, str], gemms: int, attention: bool) -> str:
    """Return what the log calls a Place: "7.fc2.weight", "7.attention.qkv.input", "head.grad_output".

    whole: {a module's name on this stage: in the whole model}, {} without stages. gemms, attention: of its module.
    """
    name = whole.get(place.module, place.module)
    number, part = layer_number(name), name.rpartition(".")[2]
    which = _ATTENTION[place.gemm] if attention else f"fc{place.gemm + 1}" if gemms > 1 else ""
    where = "attention" if attention else _GEMMS.get(part, part)
    layer = HEAD if number is None else str(number)
    return ".".join(filter(None, (layer, where, which, place.tensor)))


class Faults:
    """What is beyond the limits of a Fallback, {decoder layer's number, None for the head: in words}."""

    def __init__(self, tensors: Tensors, fallback: Fallback) -> None:
        self.found: dict[int | None, str] = {}
        for name, statistics in tensors.items():
            layer, _, tensor = name.partition(".")
            for limited in LIMITED:
                value, limit = getattr(statistics, limited), getattr(fallback.limits, limited)
                if value > limit:
                    number = None if layer == HEAD else int(layer)
                    self.found.setdefault(number, f"{tensor}: {limited} {value:.3g}, more than {limit:g}")


class FP8StatisticsCallback(Callback):
    """Count every `--fp8_statistics` steps, and write `output_dir`/fp8_statistics.jsonl (`runs.fp8_log`).

    It adds WORST to the Trainer's logs, for which it must come before the callbacks that read them, and does what
    --fp8_fallback says. All ranks of a step take part: its end is collective.

    in_16_bits: the trainer's list of the numbers of the layers that have left fp8, which checkpoints keep.
    """

    def __init__(self, every: int, fallback: Fallback | None, in_16_bits: MutableSequence[int]) -> None:
        self._every, self._fallback, self._in_16_bits = every, fallback, in_16_bits
        self._recorder: Recorder | None = None
        self._running = False
        self._worst: dict[str, float] = {}

    def on_train_begin(
        self, args: HostArguments, state: State, control: Control, model: HostModel = None, **kwargs: Any
    ) -> None:
        self._modules, self._whole = fp8.name_modules(model), stage_layer_names(model)
        self._recorder, self._recipe = Recorder(self._modules), _recipe_of(model)
        if state.is_world_process_zero:
            path = Path(args.output_dir) / FP8_LOG
            kept = kept_lines(path, state.global_step)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in kept))

    def on_step_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        assert self._recorder is not None  # `on_train_begin` has made it
        if (state.global_step + 1) % self._every == 0:
            self._recorder.begin(self._recipe)
            self._running = True

    def on_step_end(
        self, args: HostArguments, state: State, control: Control, model: HostModel = None, **kwargs: Any
    ) -> None:
        if not self._running or self._recorder is None:
            return
        self._running = False
        mine = {self._name(place): found for place, found in self._recorder.end(fp8_group()).items()}
        tensors: Tensors = {}
        for part in gather_objects(mine if _is_first(fp8_group()) else {}, args.world_size):
            tensors |= part
        self._worst = {
            f"fp8_{name}": max((getattr(each, name) for each in tensors.values()), default=0.0) for name in LIMITED
        }
        lines = [line_of(state.global_step, COLUMNS, {name: astuple(each) for name, each in _in_order(tensors)})]
        lines += self._judge(state, model, tensors)
        if state.is_world_process_zero:
            with open(Path(args.output_dir) / FP8_LOG, "a") as log:
                log.write("".join(f"{line}\n" for line in lines))

    def _name(self, place: Place) -> str:
        module = self._modules[place.module]
        return tensor_name(place, self._whole, module.num_gemms, module.attention)

    def _judge(self, state: State, model: HostModel, tensors: Tensors) -> list[str]:
        """Warn of what is beyond the limits, or take its layers out of fp8; return lines for the file."""
        if self._fallback is None:
            return []
        faults = Faults(tensors, self._fallback).found
        switched = {number: why for number, why in faults.items() if number is not None}
        if self._fallback.action != SWITCH:
            switched = {}
        for number, why in faults.items() if state.is_world_process_zero else ():
            what = "the head" if number is None else f"layer {number}"
            then = f"; it computes in 16 bits from step {state.global_step + 1} on" if number in switched else ""
            logger.warning(f"fp8 in step {state.global_step}: {what}, {why}{then}")
        if not switched:
            return []
        compute_in_16_bits(model, switched)
        self._in_16_bits[:] = sorted({*self._in_16_bits, *switched})
        return [line_of_switch(state.global_step, switched)]

    def on_log(
        self, args: HostArguments, state: State, control: Control, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is not None and "loss" in logs:
            logs.update({name: round(value, 6) for name, value in self._worst.items()})
            self._worst = {}


def _is_first(group: Group | None) -> bool:
    """Say whether this rank speaks for a group whose ranks all have the same."""
    return group is None or group.ranks[0] == dist.get_rank()


def _recipe_of(model: HostModel) -> Recipe:
    recipe = recipe_of(model.config)
    assert recipe is not None  # the option needs --use_fp8
    return recipe


def _in_order(tensors: Tensors) -> list[tuple[str, Statistics]]:
    """Return the items by the number of their layer, the head last."""

    def key(item: tuple[str, Statistics]) -> tuple[bool, int]:
        layer = item[0].partition(".")[0]
        return layer == HEAD, 0 if layer == HEAD else int(layer)

    return sorted(tensors.items(), key=key)
