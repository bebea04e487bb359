"""Check the small files with which a run goes on: schedule, random numbers, scales of fp8.

Their checksums tell what has changed since they were saved; these checks are for files that were saved as something
else, or changed together with their manifest. Hosts, Paddle and Python name only the key or type they fail on.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_te import typed
from paddle_te.weights import pdparams
from paddle_te.weights.tensors import CheckpointError

SCHEDULE_KEY = "LR_Scheduler"  # in an optimizer's file
_GENERATORS = ("python", "numpy", "cpu", "cuda")
_MERSENNE_WORDS = 624


def check_run_state(path: Path) -> None:
    """Raise CheckpointError where a file of these names does not hold what a run reads from it."""
    for pattern, check in _CHECKS.items():
        if re.fullmatch(pattern, path.name):
            try:
                check(path, pdparams.check(path))
            except typed.NotAsDeclared as error:
                raise CheckpointError(f"{path}: {error}") from error


def _schedule(path: Path, state: Any, name: str = "") -> None:
    state = typed.read(dict, state, name)
    for key in ("last_epoch", "last_lr"):
        if key not in state:
            raise typed.NotAsDeclared(f"{name}{key}", None, "missing")
    if not isinstance(state["last_lr"], pdparams.Scalar):
        typed.read(float, state["last_lr"], f"{name}last_lr")
    if typed.read(int, state["last_epoch"], f"{name}last_epoch") < 0:
        raise typed.NotAsDeclared(f"{name}last_epoch", str(state["last_epoch"]), "at least 0")


def _optimizer(path: Path, state: Any) -> None:
    if isinstance(state, dict) and SCHEDULE_KEY in state:
        _schedule(path, state[SCHEDULE_KEY], f"{SCHEDULE_KEY}.")


def _random_numbers(path: Path, state: Any) -> None:
    for each in state if isinstance(state, list) and state else [state]:  # a list has one for each process
        each = typed.read(dict, each)
        if missing := [name for name in _GENERATORS if name not in each]:
            raise typed.NotAsDeclared(", ".join(missing), None, "missing")
        if not (_is_pythons(each["python"]) and _is_numpys(each["numpy"]) and _is_generator(each["cpu"])):
            raise CheckpointError(f"{path}: does not hold the states of Python's, NumPy's and Paddle's generators")
        if not all(map(_is_generator, typed.read(list, each["cuda"], "cuda"))):
            raise CheckpointError(f"{path}: cuda: these are no states of Paddle's generators")


def _is_generator(state: object) -> bool:
    return isinstance(state, pdparams.GeneratorState)


def _is_pythons(state: object) -> bool:
    if not (isinstance(state, tuple) and len(state) == 3 and state[0] == 3 and isinstance(state[1], tuple)):
        return False
    words = [type(word) is int and 0 <= word < 2**32 for word in state[1]]
    return len(words) == _MERSENNE_WORDS + 1 and all(words) and state[1][-1] <= _MERSENNE_WORDS


def _is_numpys(state: object) -> bool:
    if not (isinstance(state, tuple) and len(state) == 5 and state[0] == "MT19937"):
        return False
    return isinstance(state[1], pdparams.Array) and state[1].shape == (_MERSENNE_WORDS,)


def _scales(path: Path, state: Any) -> None:
    state = typed.read(dict, state)
    modules = typed.read(dict[str, dict[str, Any]], state.get("modules"), "modules")
    typed.read(dict, state.get("recipe"), "recipe")
    shapes: dict[str, list[tuple[tuple[int, ...], ...]]] = defaultdict(
        list
    )  # of a kind of modules, such as layers.N.….proj
    for name, module in modules.items():
        shapes[re.sub(r"\blayers\.\d+\.", "layers.N.", name)].append(_shapes(path, module, f"modules.{name}"))
    if unlike := [kind for kind, found in shapes.items() if len({*found}) > 1]:
        raise CheckpointError(f"{path}: the states of {unlike[0]} have several shapes")
    of_layers = {kind: len(found) for kind, found in shapes.items() if "layers.N." in kind}
    if len({*of_layers.values()}) > 1:
        raise CheckpointError(f"{path}: some layers have no state of {min(of_layers, key=of_layers.__getitem__)}")


def _shapes(path: Path, module: dict[str, Any], name: str) -> tuple[tuple[int, ...], ...]:
    for flag in ("done", "fresh") if "fresh" in module else ("done",):  # an older version wrote no "fresh"
        typed.read(bool, module.get(flag), f"{name}.{flag}")
    found = []
    for direction in ("forward", "backward"):
        part = typed.read(dict, module.get(direction), f"{name}.{direction}")
        arrays = {key: _numbers(path, part.get(key), f"{name}.{direction}.{key}") for key in ("amax_history", "scale")}
        if (arrays["amax_history"] < 0).any() or (arrays["scale"] <= 0).any():
            raise CheckpointError(f"{path}: {name}.{direction} has an amax below 0, or a scale that is not above 0")
        found += [array.shape for array in arrays.values()]
    return tuple(found)


def _numbers(path: Path, value: object, name: str) -> npt.NDArray[np.float32]:
    if not isinstance(value, pdparams.Array) or value.shape is None or value.dtype.code != "f4":
        raise CheckpointError(f"{path}: {name} is no array of float32")
    numbers = np.fromfile(path, "<f4", value.data.length // 4, offset=value.data.offset)
    if not np.isfinite(numbers).all():
        raise typed.NotAsDeclared(name, None, "not finite")
    return numbers.reshape(value.shape, order=value.order)


_CHECKS: dict[str, Callable[[Path, Any], None]] = {
    r"scheduler\.pdparams": _schedule,
    r"optimizer.*\.pdopt": _optimizer,
    r"rng_state.*\.pth": _random_numbers,
    r"fp8_state\..*\.pdparams": _scales,
}
