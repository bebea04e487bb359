"""Run files: a job's arguments as JSON, `paddle-te pretrain FILE.json [--name value ...]`.

A key is the name of one of the launcher's arguments or variables, or of a flag in PaddleNLP's files of arguments. Those
flags that the launcher must know, for its checks and the folder's name, become its own arguments; all others are passed
on to the training script. What stands on the command line comes before the file, and the file before the environment.

The name of a recipe, which comes with the package, may stand in place of FILE.json, with or without `.json`.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_te import recipes
from paddle_te.launch import JobModule
from paddle_te.launch.devices import count_gpus
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.names import arguments_of, name_of
from paddle_te.options import BACKENDS
from paddle_te.options.launcher import (
    AUTO,
    COMBINED,
    FINETUNE,
    FINETUNE_VARIABLES,
    PRETRAIN,
    PRETRAIN_VARIABLES,
    VARIABLES,
)
from paddle_te.options.paddlenlp import without_unsupported
from paddle_te.planner.gpus import GPUS

PRINT_CONFIG = "--print-config"
# What belongs to this start and not to the run
_OF_THIS_START = {"DRY_RUN", "OVERWRITE", "NODE_RANK", "MASTER", "MASTER_PORT", "IP_STR"}
_LAUNCHERS = {option.name for option in (*PRETRAIN, *PRETRAIN_VARIABLES, *FINETUNE, *FINETUNE_VARIABLES, *VARIABLES)}


def is_run_file(words: list[str]) -> bool:
    """Return whether a command begins with a run file or the name of a recipe, also of one that is misspelt."""
    if not words or words[0].startswith("-"):
        return False
    name = words[0]
    if name.endswith(".json") or recipes.find(name) is not None:
        return True
    return bool(recipes.like(name)) and not Path(name).expanduser().exists()


def as_arguments(job: JobModule, words: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return `FILE.json [--name value ...]` as --name=value, which `arguments.by_name` takes.

    Raises:
        LaunchError: there is no such file, it is no object of names and values, or a name or value means nothing here.
    """
    values = _read(words[0])
    given = _Translation(job, _arguments(job, words[0], values))
    given.update(_Translation(job, _pairs(words[1:])))
    given.combine()
    given.arguments = _gpus_elsewhere(values, {**environ, **given.arguments}) | given.arguments
    extra = [word for name, value in given.flags.items() for word in (f"--{name}", *_words(value))]
    launchers = dict(given.arguments)
    if extra:
        before = str(launchers.get("EXTRA_ARGS") or environ.get("EXTRA_ARGS", ""))
        launchers["EXTRA_ARGS"] = f"{before} {shlex.join(extra)}".strip()
    return [f"--{name}={value}" for name, value in launchers.items()]


def complete(job: JobModule, args: argparse.Namespace) -> str:
    """Return the run file, as text, of a job's arguments: with it, the same run starts without any variable."""
    options = [option for option in arguments_of(job) if option.name not in _OF_THIS_START]
    values = {option.name: getattr(args, option.name) for option in options}
    values = {name: ",".join(value) if isinstance(value, list) else value for name, value in values.items()}
    return json.dumps({name: value for name, value in values.items() if value not in (None, "")}, indent=2)


def _gpus_elsewhere(values: Mapping[str, Any], told: Mapping[str, object]) -> dict[str, object]:
    """Return the GPUs of a node that a recipe is for, where a dry run sees none and nobody names others."""
    gpus, card = values.get("gpus"), str(values.get("card"))
    named = not {"DEVICE", "DEVICES", "GPU", "CUSTOM_DEVICE_ROOT"}.isdisjoint(told)
    if named or not _is_on(told.get("DRY_RUN", 0)) or card not in GPUS or not isinstance(gpus, int):
        return {}
    if gpus > GPUS[card].gpus_per_node or count_gpus():
        return {}
    return {"GPU": card, "DEVICES": ",".join(map(str, range(gpus)))}


def _arguments(job: JobModule, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run file says of a job, without what a recipe says of itself."""
    asked = name_of(job)
    task = values.get("task")
    if task is not None and recipes.TASKS.get(str(task)) != asked:
        known = ", ".join(each for each, command in recipes.TASKS.items() if command == asked)
        raise LaunchError(f"{name}: its task is {task}, and paddle-te {asked} runs {known}")
    return {key: value for key, value in values.items() if key not in recipes.ABOUT}


def _read(name: str) -> dict[str, Any]:
    own = Path(name).expanduser()
    path = own if own.is_file() else recipes.find(name)
    if path is None:
        alike = " or ".join(recipes.like(name))
        remedy = f"did you mean {alike}?" if alike else "paddle-te recipes lists those"
        raise LaunchError(f"{name}: there is no such file, and no such recipe; {remedy}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise LaunchError(f"{path}: must be an object of names and values, {{...}}")
    if nested := [key for key, value in values.items() if isinstance(value, dict)]:
        raise LaunchError(f"{path}: {nested[0]} must be a value, not an object")
    return values


def lacks_value(name: str, following: str | None) -> bool:
    """Return whether no value follows --NAME: nothing, or the next argument. The value of EXTRA_ARGS is flags."""
    return following is None or (following.startswith("--") and name != "--EXTRA_ARGS")


def _pairs(words: list[str]) -> dict[str, Any]:
    """--name value and --name=value."""
    values, words = {}, list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            raise LaunchError(f"{name}: after a run file, arguments are written as --NAME VALUE")
        if not equals:
            if lacks_value(name, words[0] if words else None):
                raise LaunchError(f"{name}: its value is missing; write --NAME VALUE")
            value = words.pop(0)
        values[name[2:]] = value
    return values


def _words(value: object) -> list[str]:
    return [_text(each) for each in value] if isinstance(value, list) else [_text(value)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_true(name: str, value: object) -> bool:
    if _text(value).lower() not in ("true", "false", "1", "0"):
        raise LaunchError(f"{name}: {value!r} must be true or false")
    return _is_on(value)


def _is_on(value: object) -> bool:
    return _text(value).lower() in ("true", "1")


class _Translation:
    """Names and values as the launcher's arguments, and as flags that are passed on."""

    def __init__(self, job: JobModule, values: Mapping[str, object]) -> None:
        self.job = job
        self.options = {option.name: option for option in arguments_of(job)}
        self.by_flag = {option.flag: option.name for option in self.options.values() if option.flag}
        self.arguments: dict[str, object] = {}
        self.flags: dict[str, object] = {}
        try:
            values = without_unsupported(values)
        except ValueError as error:
            raise LaunchError(str(error)) from error
        for key, value in values.items():
            if value is not None:
                self._put(key, value)

    def _put(self, key: str, value: object) -> None:
        name = self.by_flag.get(key, key)
        of_paddlenlp = key == "sharding" or key == "recompute" and _text(value).lower() in ("true", "false", "1", "0")
        if key == "transformer_engine_backend":
            names = {flag: backend for backend, flag in BACKENDS.items()}
            name, value = "backend", names.get(str(value), value)
        if name in self.options and not of_paddlenlp:
            if key != name and str(value) == "-1":  # PaddleNLP's word for: not given
                return
            if self.options[name].kind.type is bool and value != AUTO:
                value = _is_true(key, value)
            self.arguments[name] = ",".join(value) if isinstance(value, list) else _text(value)
        elif key in _LAUNCHERS and not of_paddlenlp:
            raise LaunchError(f"{key}: paddle-te {name_of(self.job)} has no such argument")
        elif other := next((each for each in self.options if each != key and each.lower() == key.lower()), ""):
            raise LaunchError(f"{key}: there is no such name; here it is {other}")
        else:
            self.flags[key] = value

    def update(self, other: _Translation) -> None:
        """Take what the other says, where both say something, in whichever words."""
        for name, flags in COMBINED.items():
            if name in other.arguments or other.flags.keys() & set(flags):
                self.arguments.pop(name, None)
            if name in other.arguments:
                self.flags = {flag: value for flag, value in self.flags.items() if flag not in flags}
        if "DATA_PATH" in other.arguments:
            self.arguments.pop("MOCK_DATA", None)
        self.arguments |= other.arguments
        self.flags |= other.flags

    def combine(self) -> None:
        """Several of PaddleNLP's flags become one argument."""
        self._precision()
        if "recompute" in self.flags:
            granularity = self.flags.pop("recompute_granularity", "full")
            self._say("recompute", granularity if _is_true("recompute", self.flags.pop("recompute")) else "none")
        if stage := self.flags.pop("sharding", ""):
            self._say("sharding_stage", stage)
            self.arguments.setdefault("FSDP", "all")
        if self.flags.get("resume_from_checkpoint"):
            raise LaunchError("resume_from_checkpoint: here it is resume_step, auto or a saved step's number")

    def _precision(self) -> None:
        flags = {name: self.flags.pop(name) for name in ("bf16", "fp16", "use_fp8") if name in self.flags}
        level = self.flags.pop("fp16_opt_level", None)
        if not flags:
            return
        on = {name for name, value in flags.items() if _is_true(name, value)}
        if "fp16" in on:
            raise LaunchError("fp16: bf16, fp8 and float32 are there; set bf16")
        if on and level != "O2":
            raise LaunchError(f"fp16_opt_level: {level or 'O1 (not given)'}: 16-bit training is O2 here; set it to O2")
        self._say("precision", "fp8" if "use_fp8" in on else "bf16" if "bf16" in on else "fp32")

    def _say(self, name: str, value: object) -> None:
        if self.arguments.setdefault(name, value) != value:
            raise LaunchError(f"{name}={self.arguments[name]} and PaddleNLP's flags for it, {value}, differ: give one")
