"""Save and restore the scaling state bit for bit, keyed by the layers' structured names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor, nn

from paddle_te.fp8.module import DelayedBinding, ModuleScaling, scaling_modules
from paddle_te.fp8.recipe import Recipe
from paddle_te.fp8.state import Block
from paddle_te.options import LAYER_OPTIONS

VERSION = 1
Floats: TypeAlias = npt.NDArray[np.float32]


def name_modules(root: nn.Layer) -> dict[str, ModuleScaling]:
    """Return {structured name: ModuleScaling} of all layers under `root` that have one as `fp8`; set their names."""
    modules = scaling_modules(root)
    for name, module in modules.items():
        module.name = name
    return modules


def _describe(recipe: Recipe) -> dict[str, Any]:
    fields = asdict(recipe)
    fields.pop("first_step", None)  # what follows a saved state does not depend on it
    if not fields["fp8_dpa"]:  # states from before there was such a thing serve as well
        fields = {name: value for name, value in fields.items() if not name.startswith("fp8_dpa")}
    return {"name": type(recipe).__name__, **fields, "fp8_format": fields["fp8_format"].name}


def _serving(root: nn.Layer, recipe: Recipe) -> dict[str, ModuleScaling]:
    """Return `name_modules` of those that compute in fp8 under the recipe."""
    return {name: module for name, module in name_modules(root).items() if module.serves(recipe)}


def _bindings(modules: Mapping[str, ModuleScaling], recipe: Recipe) -> dict[str, DelayedBinding]:
    """Return {name: Binding}; modules that have never run get theirs."""
    bindings = {name: module.bind(recipe) for name, module in modules.items()} if recipe.kind == "delayed" else {}
    return {name: binding for name, binding in bindings.items() if isinstance(binding, DelayedBinding)}


def _columns(bindings: Mapping[str, DelayedBinding]) -> Iterator[tuple[str, str, Block, slice]]:
    """Yield (name, direction, Block, the module's columns in it) for each name and direction."""
    for name, binding in bindings.items():
        for direction, per_gemm in (("forward", 2), ("backward", 1)):
            start = binding.gemm * per_gemm
            columns = slice(start, start + binding.num_gemms * per_gemm)
            yield name, direction, getattr(binding.pair, direction), columns


def _copies(bindings: Mapping[str, DelayedBinding]) -> dict[Block, list[Floats]]:
    """Return {Block: [history, scale]} as NumPy arrays."""
    blocks = {block for _, _, block, _ in _columns(bindings)}
    for block in blocks:
        block.flush()
    return {block: [block.history.numpy().copy(), block.scale.numpy().copy()] for block in blocks}


@paddle.no_grad()
def named_tensors(root: nn.Layer, recipe: Recipe) -> list[tuple[str, Tensor]]:
    """Return [(name, tensor)] of all that `state_dict` saves, as it lies on the device.

    A history and the scales of many modules are one tensor each.
    """
    blocks: dict[Block, str] = {}
    for name, direction, block, _ in _columns(_bindings(_serving(root, recipe), recipe)):
        blocks.setdefault(block, f"fp8 {direction} {{}} (of {name} and others)")
    for block in blocks:
        block.flush()
    return [
        (name.format(kind), tensor)
        for block, name in blocks.items()
        for kind, tensor in (("amax history", block.history), ("scales", block.scale))
    ]


@paddle.no_grad()
def reduce_amax(root: nn.Layer, recipe: Recipe) -> None:
    """Give the ranks of the fp8 group the same amaxes of the running step, now and not at its end. A collective.

    Only then is one rank's `state_dict` that of all ranks of the group: until the step ends each rank has its own
    amaxes. Changes no result. Does nothing without a group, with reduce_amax=False and for current scaling.
    """
    bindings = _bindings(_serving(root, recipe), recipe)
    groups = {block: bindings[name].state.reduction_group() for name, _, block, _ in _columns(bindings)}
    for block, group in groups.items():  # in the same order on all ranks
        if group is not None:
            block.reduce(group)


def state_dict(root: nn.Layer, recipe: Recipe) -> dict[str, Any]:
    """Return the scaling state of all layers under `root` for `recipe`, on the host.

    {"version", "recipe": its fields, "modules": {name: {"forward": {"amax_history": [len, 2·GEMMs] (input and weight
    of each), "scale": [2·GEMMs]}, "backward": the same with [GEMMs], "done": whether its next forward may begin a
    step, "fresh": whether there has been no update yet}}}. Current scaling has no state: no modules. It is this rank's;
    see `reduce_amax`.
    """
    bindings = _bindings(_serving(root, recipe), recipe)
    copies = _copies(bindings)
    saved: dict[str, dict[str, Any]] = {
        name: {"done": binding.may_begin_step, "fresh": binding.pair.fresh} for name, binding in bindings.items()
    }
    for name, direction, block, columns in _columns(bindings):
        history, scale = copies[block]
        saved[name][direction] = {"amax_history": history[:, columns].copy(), "scale": scale[columns].copy()}
    return {"version": VERSION, "recipe": _describe(recipe), "modules": saved}


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _flag(field: str) -> str:
    """Return the scripts' flag for a recipe's field."""
    flag = field if field in LAYER_OPTIONS else f"fp8_{field}"
    return f"--{flag}" if flag in LAYER_OPTIONS else field


def _check_recipe(state: Any, recipe: Recipe) -> None:
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"this is no fp8 scaling state of version {VERSION}")
    saved, present = state["recipe"], _describe(recipe)
    differences = [
        f"{_flag(key)}: {saved.get(key)!r} there, {present.get(key)!r} here"
        for key in {**present, **saved}
        if saved.get(key) != present.get(key)
    ]
    if differences:
        raise ValueError(
            f"the fp8 state was saved under another recipe ({'; '.join(differences)}); resume with the same"
        )


def _check(state: Any, modules: Mapping[str, ModuleScaling], recipe: Recipe) -> None:
    _check_recipe(state, recipe)
    expected = set(modules) if recipe.kind == "delayed" else set()
    if missing := expected - set(state["modules"]):
        raise ValueError(f"the fp8 state lacks modules of this model: {_some(missing)}; resume with the same flags")
    if unknown := set(state["modules"]) - expected:
        raise ValueError(
            f"the fp8 state has modules that this model lacks: {_some(unknown)}; resume with the same flags"
        )


def set_state_dict(root: nn.Layer, state: dict[str, Any], recipe: Recipe) -> None:
    """Restore what `state_dict(root, recipe)` gave, to the bit. Call it between steps.

    Raises ValueError, and changes nothing, where the recipe differs (its amax_history_len included), a module is
    missing or unknown, or shapes differ.
    """
    modules = _serving(root, recipe)
    _check(state, modules, recipe)
    bindings = _bindings(modules, recipe)
    copies = _copies(bindings)
    for name, direction, block, columns in _columns(bindings):
        for key, target in zip(("amax_history", "scale"), copies[block], strict=True):
            value = np.asarray(state["modules"][name][direction][key])
            if value.shape != target[..., columns].shape or value.dtype != np.float32:
                raise ValueError(
                    f"the fp8 state of {name}, {direction} {key}, is {value.dtype} of shape {list(value.shape)}; "
                    f"this model's is float32 of shape {list(target[..., columns].shape)}"
                )
            target[..., columns] = value
    for block, arrays in copies.items():
        block.restore(*arrays)
    # states from before there was "fresh" began with scale 1, and go on with it
    updated = {binding.pair for name, binding in bindings.items() if not state["modules"][name].get("fresh", False)}
    for pair in {binding.pair for binding in bindings.values()}:
        pair.set_fresh(pair not in updated)
        pair.generation += 1  # weights quantized under the scales before are of no use any more
    for name, binding in bindings.items():
        pair, binding.done = binding.pair, None
        pair.active = True
        if state["modules"][name]["done"]:
            binding.done = pair.done = pair.generation


def save(path: str | Path, root: nn.Layer, recipe: Recipe, names: Mapping[str, str] | None = None) -> None:
    """Write `state_dict(root, recipe)` to a file, whole or not at all.

    Each rank has a state of its own: give each its own path, or call `reduce_amax` on all ranks of the fp8 group and
    save one. names: {layer's structured name: what the file calls it}, for a pipeline stage, whose own names are others
    than the whole model's.
    """
    state, partial = state_dict(root, recipe), f"{path}.partial"
    state["modules"] = {(names or {}).get(name, name): module for name, module in state["modules"].items()}
    paddle.save(state, partial)
    os.replace(partial, path)


def check_file(path: str | Path, recipe: Recipe) -> None:
    """Raise ValueError, with the path, where `load` would because of the recipe: before there is a model."""
    try:
        _check_recipe(paddle.load(str(path), return_numpy=True), recipe)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load(
    path: str | Path | Sequence[str | Path],
    root: nn.Layer,
    recipe: Recipe,
    names: Mapping[str, str] | Callable[[set[str]], Mapping[str, str]] | None = None,
) -> None:
    """Do `set_state_dict` from a file of `save`, or from a list of them, of all pipeline stages: it takes its own.

    names: as in `save`, or a function that makes them of the set of names in the files. Raises FileNotFoundError, and
    ValueError with the path.
    """
    several = not isinstance(path, str | Path)
    paths = [str(path)] if isinstance(path, str | Path) else [str(p) for p in path]
    if not all(map(os.path.isfile, paths)) or not paths:
        raise FileNotFoundError(f"no fp8 scaling state at {path}; it was saved beside the weights, one file a rank")
    states = [paddle.load(p, return_numpy=True) for p in paths]
    if callable(names):
        names = names({name for state in states if isinstance(state, dict) for name in state.get("modules", ())})
    try:
        set_state_dict(root, _joined(states, _serving(root, recipe), names or {}) if several else states[0], recipe)
    except ValueError as error:
        raise ValueError(f"{', '.join(paths)}: {error}") from error


def _joined(states: Sequence[Any], modules: Collection[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Return one state of several files', with the layers in `modules` only."""
    if any(not isinstance(s, dict) or s.get("recipe") != states[0].get("recipe") for s in states):
        raise ValueError("these are no fp8 scaling states of one run")
    saved = {name: module for state in states for name, module in state["modules"].items()}
    mine = {name: saved[names.get(name, name)] for name in modules if names.get(name, name) in saved}
    return states[0] | {"modules": mine}
