"""What a layer holds for its fp8 GEMMs."""

import itertools
import weakref

from . import autocast
from .state import Quantizer, scaling_state

_modules = weakref.WeakSet()
_count = itertools.count()


class GemmQuantizers:
    """One forward pass of one GEMM y = x · weightᵀ: `input`, `weight` and `grad_output` are its Quantizers.

    module: the ForwardPass; backward calls module.backward_done() when it has finished, in a module with several
    GEMMs as often as it likes.
    update_weight: True: quantize the weight now, then hand the result to `cache_weight`. False: `cached_weight` serves.
    """

    __slots__ = ("input", "weight", "grad_output", "module", "update_weight", "_keep", "_generation", "_cache")

    def __init__(self, slots, module, is_first_microbatch, generation):
        self.input, self.weight, self.grad_output, self._cache = slots
        self.module = module
        self._keep = is_first_microbatch is not None
        self._generation = generation
        cache = self._cache
        # weights of another generation lie under another scale
        self.update_weight = is_first_microbatch is not False or cache.value is None or cache.generation != generation

    @property
    def cached_weight(self):
        """What `cache_weight` kept last, None for nothing. Where update_weight is True it is out of date."""
        return self._cache.value

    def cache_weight(self, value):
        """Keep the quantized weight for the micro-batches to come, unless is_first_microbatch was None."""
        self._cache.value = value if self._keep else None
        self._cache.generation = self._generation


class WeightCache:
    """A backend's quantized weight, and under which generation of scales it was made."""

    __slots__ = ("value", "generation")

    def __init__(self):
        self.value = None
        self.generation = -1


class Binding:
    """A module's quantizers for one recipe, and under delayed scaling its place among the other modules'.

    slots, evaluation_slots: per GEMM (input, weight, grad_output, WeightCache).
    state, forward, backward: the ScalingState and the two Blocks, None under current scaling; gemm: the first one's
    place in them. done: the generation of scales in which the module last completed a backward.
    """

    __slots__ = ("slots", "evaluation_slots", "state", "forward", "backward", "gemm", "done")

    def __init__(self, slots, evaluation_slots, state=None, forward=None, backward=None, gemm=0):
        self.slots, self.evaluation_slots = slots, evaluation_slots
        self.state, self.forward, self.backward, self.gemm = state, forward, backward, gemm
        self.done = None


class ForwardPass:
    """From a module's forward to the end of its backward, or until nobody can run that any more."""

    __slots__ = ("_scaling", "_binding", "_generation", "_training")

    def __init__(self, scaling, binding, training):
        self._scaling, self._binding, self._training = scaling, binding, training
        self._generation = binding.state.generation
        binding.state.in_flight += 1

    def backward_done(self):
        """Raises RuntimeError when the scales were updated since the forward: the gradients are wrong then."""
        binding = self._close()
        if binding is None:
            return
        if binding.state.generation != self._generation:
            raise RuntimeError(
                f"fp8 scales were updated between forward and backward of {self._scaling.name or 'a module'}; "
                "call fp8.new_step() only when every forward has had its backward"
            )
        if self._training:
            binding.done = self._generation

    def _close(self):
        binding, self._binding = self._binding, None
        if binding is not None:
            binding.state.in_flight -= 1
        return binding

    __del__ = _close  # the graph was dropped, or there was none (no_grad)


class _Untracked:
    """The ForwardPass of current scaling, which has no state."""

    @staticmethod
    def backward_done():
        pass


class ModuleScaling:
    """The fp8 side of a layer with `num_gemms` GEMMs whose backend is `backend`. Holds no tensors before its first use.

    name: the layer's structured name, its key in checkpoints; `name_modules` sets it.
    """

    def __init__(self, num_gemms, backend):
        self.num_gemms = num_gemms
        self.backend = backend
        self.name = None
        self._order = next(_count)
        self._bindings = {}  # recipe -> Binding
        self._recipe = self._binding = None  # those of the last forward
        _modules.add(self)

    def __reduce__(self):
        # a copied or unpickled layer has scales of its own
        return ModuleScaling, (self.num_gemms, self.backend)

    def begin_forward(self, training=True, is_first_microbatch=None):
        """Call at the start of each forward: a tuple of GemmQuantizers, one a GEMM; None outside `fp8_autocast`.

        is_first_microbatch: as `fp8.microbatch`, which is asked where it is None.

        Under delayed scaling a training forward with is_first_microbatch None or True begins a new step, and all
        scales are updated, if this module has completed a backward since the last update and no forward still waits
        for its backward. So neither recompute (its second forward comes before the backward) nor evaluation
        (training False: records no amax) updates scales, nor a pipeline's forward while others are in flight.
        A pipeline schedule with recompute must say is_first_microbatch: by itself no module can tell a recomputed
        forward from the next step's.
        """
        context = autocast.get_autocast_state()
        if not context.enabled:
            return None
        if is_first_microbatch is None:
            is_first_microbatch = context.is_first_microbatch
        if context.recipe is not self._recipe:
            self._recipe, self._binding = context.recipe, self.bind(context.recipe, context.group)
        binding = self._binding
        state, slots = binding.state, binding.slots if training else binding.evaluation_slots
        if state is None:
            return tuple([GemmQuantizers(slot, _Untracked, is_first_microbatch, 0) for slot in slots])
        if training:
            state.group = context.group
            if is_first_microbatch is not False and binding.done == state.generation:
                state.begin_step(certain=is_first_microbatch is True)
        forward_pass = ForwardPass(self, binding, training)
        return tuple([GemmQuantizers(slot, forward_pass, is_first_microbatch, state.generation) for slot in slots])

    def bind(self, recipe, group=None):
        """The Binding for a recipe. Where delayed scaling has none yet, all modules without one get theirs together."""
        if recipe not in self._bindings:
            if recipe.kind == "delayed":
                state = scaling_state(self.backend, recipe, group)
                bind_delayed([m for m in _modules if m.backend == self.backend], state)
            else:
                dtypes = recipe.fp8_format.value
                triple = [Quantizer(dtype, "current") for dtype in (dtypes.forward, dtypes.forward, dtypes.backward)]
                slots = [(*triple, WeightCache()) for _ in range(self.num_gemms)]
                self._bindings[recipe] = Binding(slots, slots)
        return self._bindings[recipe]


def bind_delayed(modules, state):
    """Give the modules that have no Binding for the state's recipe theirs, in one pair of blocks."""
    modules = sorted((m for m in modules if state.recipe not in m._bindings), key=lambda m: m._order)
    forward, backward = state.add_blocks(sum(m.num_gemms for m in modules))
    gemm = 0
    for module in modules:
        caches = [WeightCache() for _ in range(module.num_gemms)]
        slots, evaluation_slots = (
            [
                (
                    forward.quantizer(2 * i, records),
                    forward.quantizer(2 * i + 1, records),
                    backward.quantizer(i, records),
                    cache,
                )
                for i, cache in enumerate(caches, gemm)
            ]
            for records in (True, False)
        )
        module._bindings[state.recipe] = Binding(slots, evaluation_slots, state, forward, backward, gemm)
        gemm += module.num_gemms
