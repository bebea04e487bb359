"""The small files with which a run goes on (schedule, random numbers, scales of fp8): whether they hold what they must.

Their checksums tell what has changed since they were saved; these checks are for files that were saved as something
else, or changed together with their manifest. A host, Paddle and Python say of such a file what they stumble over.
"""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from paddle_te import typed
from paddle_te.weights import pdparams
from paddle_te.weights.tensors import CheckpointError

SCHEDULE_KEY = "LR_Scheduler"  # in an optimizer's file
_GENERATORS = ("python", "numpy", "cpu", "cuda")
_MERSENNE_WORDS = 624


def check_run_state(path: Path) -> None:
    """Raises CheckpointError where a file of these names does not hold what a run reads from it."""
    for pattern, check in _CHECKS.items():
        if re.fullmatch(pattern, path.name):
            try:
                check(path, pdparams.check(path))
            except typed.NotAsDeclared as error:
                raise CheckpointError(f"{path}: {error}") from error


def _schedule(path, state, name=""):
    state = typed.read(dict, state, name)
    for key in ("last_epoch", "last_lr"):
        if key not in state:
            raise typed.NotAsDeclared(f"{name}{key}", None, "missing")
    if not isinstance(state["last_lr"], pdparams.Scalar):
        typed.read(float, state["last_lr"], f"{name}last_lr")
    if typed.read(int, state["last_epoch"], f"{name}last_epoch") < 0:
        raise typed.NotAsDeclared(f"{name}last_epoch", str(state["last_epoch"]), "at least 0")


def _optimizer(path, state):
    if isinstance(state, dict) and SCHEDULE_KEY in state:
        _schedule(path, state[SCHEDULE_KEY], f"{SCHEDULE_KEY}.")


def _random_numbers(path, state):
    for each in state if isinstance(state, list) and state else [state]:  # a list has one for each process
        each = typed.read(dict, each)
        if missing := [name for name in _GENERATORS if name not in each]:
            raise typed.NotAsDeclared(", ".join(missing), None, "missing")
        if not (_is_pythons(each["python"]) and _is_numpys(each["numpy"]) and _is_generator(each["cpu"])):
            raise CheckpointError(f"{path}: does not hold the states of Python's, NumPy's and Paddle's generators")
        if not all(map(_is_generator, typed.read(list, each["cuda"], "cuda"))):
            raise CheckpointError(f"{path}: cuda: these are no states of Paddle's generators")


def _is_generator(state):
    return isinstance(state, pdparams.GeneratorState)


def _is_pythons(state):
    if not (isinstance(state, tuple) and len(state) == 3 and state[0] == 3 and isinstance(state[1], tuple)):
        return False
    words = [type(word) is int and 0 <= word < 2**32 for word in state[1]]
    return len(words) == _MERSENNE_WORDS + 1 and all(words) and state[1][-1] <= _MERSENNE_WORDS


def _is_numpys(state):
    if not (isinstance(state, tuple) and len(state) == 5 and state[0] == "MT19937"):
        return False
    return isinstance(state[1], pdparams.Array) and state[1].shape == (_MERSENNE_WORDS,)


def _scales(path, state):
    state = typed.read(dict, state)
    modules = typed.read(dict[str, dict], state.get("modules"), "modules")
    typed.read(dict, state.get("recipe"), "recipe")
    shapes = defaultdict(list)  # of a kind of modules, such as layers.N.….proj
    for name, module in modules.items():
        shapes[re.sub(r"\blayers\.\d+\.", "layers.N.", name)].append(_shapes(path, module, f"modules.{name}"))
    if unlike := [kind for kind, found in shapes.items() if len({*found}) > 1]:
        raise CheckpointError(f"{path}: the states of {unlike[0]} have several shapes")
    of_layers = {kind: len(found) for kind, found in shapes.items() if "layers.N." in kind}
    if len({*of_layers.values()}) > 1:
        raise CheckpointError(f"{path}: some layers have no state of {min(of_layers, key=of_layers.get)}")


def _shapes(path, module, name):
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


def _numbers(path, value, name):
    if not isinstance(value, pdparams.Array) or value.dtype.code != "f4":
        raise CheckpointError(f"{path}: {name} is no array of float32")
    numbers = np.fromfile(path, "<f4", value.data.length // 4, offset=value.data.offset)
    if not np.isfinite(numbers).all():
        raise typed.NotAsDeclared(name, None, "not finite")
    return numbers.reshape(value.shape, order="CF"[value.fortran])


_CHECKS = {
    r"scheduler\.pdparams": _schedule,
    r"optimizer.*\.pdopt": _optimizer,
    r"rng_state.*\.pth": _random_numbers,
    r"fp8_state\..*\.pdparams": _scales,
}
