"""Keep each device's states by themselves in Paddle's tracker of random states.

The tracker remembers the numbers under which the generator of one device, the current one when it was seeded, keeps its
states. On another device these numbers mean nothing: the first recompute there makes that device's generator point at a
state that it does not have, and every later paddle.seed fails. Here the tracker's states are made on each device when
they are first asked for there, from the seeds that it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.distributed.fleet.layers.mpu.random import MODEL_PARALLEL_RNG, RNGStatesTracker

from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = (
    'After training on one device and recomputing on another in the same process, "Generator index is not found" '
    "comes from every paddle.seed."
)


def _follow_device(self: Theirs) -> None:
    """Let the tracker's states be those of the current device."""
    now = paddle.get_device()
    before = self.__dict__.setdefault("device_", now)
    if before == now:
        return
    elsewhere = self.__dict__.setdefault("states_elsewhere_", {})
    elsewhere[before] = self.states_
    self.device_, self.states_ = now, elsewhere.pop(now, {})
    for name, seed in self.__dict__.get("seeds_of_", {}).items():
        if name not in self.states_:
            _register(self, name, seed)


def _register(self: Theirs, name: str, seed: int) -> None:
    """Do as Paddle's `add`, for a name and a seed that the tracker knows."""
    cpu = paddle.base.core.default_cpu_generator()
    before, cpu_before = paddle.incubate.get_rng_state(use_index=True), cpu.get_state()
    self.states_[name] = paddle.incubate.register_rng_state_as_index()
    paddle.seed(seed)  # the CPU's too, whatever the device is
    paddle.incubate.set_rng_state(before, use_index=True)
    cpu.set_state(cpu_before)


def _reset(self: Theirs) -> None:
    _resetting.original(self)
    for name in ("device_", "states_elsewhere_", "seeds_of_"):
        self.__dict__.pop(name, None)


def _add(self: Theirs, name: str, seed: int) -> None:
    _follow_device(self)
    _adding.original(self, name, seed)
    self.__dict__.setdefault("seeds_of_", {})[name] = seed


def _get_states_tracker(self: Theirs) -> Any:
    _follow_device(self)
    return _getting.original(self)


def _set_states_tracker(self: Theirs, states: Any) -> None:
    _follow_device(self)
    _setting.original(self, states)


@contextmanager
def _rng_state(self: Theirs, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
    _follow_device(self)
    with _using.original(self, name):
        yield


_resetting = Replacement(RNGStatesTracker, "reset", _reset)
_adding = Replacement(RNGStatesTracker, "add", _add)
_getting = Replacement(RNGStatesTracker, "get_states_tracker", _get_states_tracker)
_setting = Replacement(RNGStatesTracker, "set_states_tracker", _set_states_tracker)
_using = Replacement(RNGStatesTracker, "rng_state", _rng_state)
_replacements = Replacements(_resetting, _adding, _getting, _setting, _using)
apply, undo = _replacements.apply, _replacements.undo
