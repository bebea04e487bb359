"""Paddle's tracker of random states keeps those of each device by themselves.

The tracker remembers the numbers under which the generator of one device, the current one when it was seeded, keeps its
states. On another device these numbers mean nothing: the first recompute there makes that device's generator point at a
state that it does not have, and every later paddle.seed fails. Here the tracker's states are made on each device when
they are first asked for there, from the seeds that it was given.
"""

from contextlib import contextmanager

import paddle
from paddle.distributed.fleet.layers.mpu.random import MODEL_PARALLEL_RNG, RNGStatesTracker

from paddle_te.upstream.replacement import Replacement, Replacements

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = (
    'After training on one device and recomputing on another in the same process, "Generator index is not found" '
    "comes from every paddle.seed."
)


def _follow_device(self):
    """Lets the tracker's states be those of the current device."""
    now = paddle.get_device()
    before = vars(self).setdefault("device_", now)
    if before == now:
        return
    elsewhere = vars(self).setdefault("states_elsewhere_", {})
    elsewhere[before] = self.states_
    self.device_, self.states_ = now, elsewhere.pop(now, {})
    for name, seed in vars(self).get("seeds_of_", {}).items():
        if name not in self.states_:
            _register(self, name, seed)


def _register(self, name, seed):
    """As Paddle's `add`, for a name and a seed that the tracker knows."""
    cpu = paddle.base.core.default_cpu_generator()
    before, cpu_before = paddle.incubate.get_rng_state(use_index=True), cpu.get_state()
    self.states_[name] = paddle.incubate.register_rng_state_as_index()
    paddle.seed(seed)  # the CPU's too, whatever the device is
    paddle.incubate.set_rng_state(before, use_index=True)
    cpu.set_state(cpu_before)


def _reset(self):
    _resetting.original(self)
    for name in ("device_", "states_elsewhere_", "seeds_of_"):
        vars(self).pop(name, None)


def _add(self, name, seed):
    _follow_device(self)
    _adding.original(self, name, seed)
    vars(self).setdefault("seeds_of_", {})[name] = seed


def _get_states_tracker(self):
    _follow_device(self)
    return _getting.original(self)


def _set_states_tracker(self, states):
    _follow_device(self)
    _setting.original(self, states)


@contextmanager
def _rng_state(self, name=MODEL_PARALLEL_RNG):
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
