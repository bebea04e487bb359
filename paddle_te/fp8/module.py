"""Hold a layer's side of its fp8 GEMMs, and say which layers are one model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import paddle
from paddle import nn
from paddle.distributed.communication.group import Group

from paddle_te.fp8 import autocast
from paddle_te.fp8.recipe import DelayedScaling, Recipe
from paddle_te.fp8.state import BlockPair, Quantizer, ScalingState, Update, scaling_state
from paddle_te.fp8.stored import StoredWeight


class Pass(Protocol):
    """A forward pass, as backward sees it: it calls backward_done when it has finished."""

    def backward_done(self) -> None: ...


class GemmQuantizers:
    """One forward pass of one GEMM y = x · weightᵀ: `input`, `weight` and `grad_output` are its Quantizers.

    forward_pass: the ForwardPass. Backward calls forward_pass.backward_done() at its end; a module with several GEMMs
    may call it several times.
    amax_group: the group whose ranks have the same scales; None: each rank has its own.
    update_weight: True: quantize the weight now, then pass the result to `cache_weight`. False: use `cached_weight`, or
    a StoredWeight's own bytes; its `cached_weight` is the transposed copy.
    keeps_weight: whether `cache_weight` keeps it for later micro-batches: is_first_microbatch was not None.
    """

    __slots__ = (
        "input",
        "weight",
        "grad_output",
        "forward_pass",
        "amax_group",
        "update_weight",
        "keeps_weight",
        "_generation",
        "_cache",
    )

    def __init__(
        self,
        gemm: Gemm,
        forward_pass: Pass,
        is_first_microbatch: bool | None,
        generation: int = 0,
        amax_group: Group | None = None,
    ) -> None:
        self.input, self.weight, self.grad_output, self._cache = gemm
        self.forward_pass, self.amax_group = forward_pass, amax_group
        stored = self.weight.kind == "stored"
        self.keeps_weight = is_first_microbatch is not None and not stored
        self._generation = generation
        cache = self._cache
        # weights of another generation lie under another scale
        out_of_date = is_first_microbatch is not False or cache.value is None or cache.generation != generation
        self.update_weight = out_of_date and not stored

    @property
    def cached_weight(self) -> Any:
        """The weight that `cache_weight` kept last, or a StoredWeight's transposed copy; None for nothing.

        Where update_weight is True it is out of date.
        """
        return self.weight.transpose if isinstance(self.weight, StoredWeight) else self._cache.value

    def cache_weight(self, value: Any) -> None:
        """Keep the quantized weight for the micro-batches to come, if keeps_weight."""
        self._cache.value = value if self.keeps_weight else None
        self._cache.generation = self._generation


class WeightCache:
    """A backend's quantized weight, and under which generation of scales it was made."""

    __slots__ = ("value", "generation")

    def __init__(self) -> None:
        self.value = None
        self.generation = -1


class Gemm(NamedTuple):
    """One GEMM's Quantizers and its WeightCache."""

    input: Quantizer
    weight: Quantizer | StoredWeight
    grad_output: Quantizer
    cache: WeightCache


class Binding:
    """A module's quantizers for one recipe.

    gemms, evaluation_gemms: a Gemm for each, which share their caches. stored: the StoredWeight of each, None for one
    that is quantized in each step.
    """

    def __init__(self, recipe: Recipe, stored: Sequence[StoredWeight | None]) -> None:
        self.num_gemms = len(stored)
        for weight in filter(None, stored):
            weight.check_recipe(recipe)
        weights = [(weight, WeightCache()) for weight in stored]

        def gemms(records: bool) -> list[Gemm]:
            pairs = zip(recipe.scalings, recipe.first_scalings, strict=True)
            of_input, of_weight, of_grad = [partial(Quantizer, *pair, records) for pair in pairs]
            return [Gemm(of_input(), weight or of_weight(), of_grad(), cache) for weight, cache in weights]

        self.gemms, self.evaluation_gemms = gemms(True), gemms(False)


class DelayedBinding(Binding):
    """A Binding under delayed scaling, with its place among the other modules.

    pair: the BlockPair, where `move_to` has put it. gemm: the place of the first GEMM in it. done: the generation of
    scales in which the module's latest pass ended, None as long as that runs.
    """

    pair: BlockPair

    def __init__(self, recipe: DelayedScaling, stored: Sequence[StoredWeight | None], state: ScalingState) -> None:
        super().__init__(recipe, stored)
        self.state, self.gemm = state, 0
        self.done: int | None = None

    @property
    def may_begin_step(self) -> bool:
        """Whether a backward of this generation is complete, and the module's own latest pass has ended in it."""
        return self.done == self.pair.done == self.pair.generation

    def move_to(self, pair: BlockPair, gemm: int) -> None:
        """Take the columns of a BlockPair that begin with those of its GEMM number `gemm`."""
        self.pair, self.gemm = pair, gemm
        for gemms in (self.gemms, self.evaluation_gemms):
            for i, quantizers in enumerate(gemms, gemm):
                quantizers.input.move_to(pair.forward, 2 * i)
                quantizers.weight.move_to(pair.forward, 2 * i + 1)
                quantizers.grad_output.move_to(pair.backward, i)


class ForwardPass:
    """From a module's forward to the end of its backward, or until nobody can run that any more. recipe: forward's."""

    __slots__ = ("recipe", "_scaling", "_binding", "_generation", "_learns")

    def __init__(self, scaling: ModuleScaling, binding: DelayedBinding, training: bool) -> None:
        self.recipe = binding.state.recipe
        self._scaling = scaling
        self._learns = training and paddle.is_grad_enabled()  # False: recompute's first forward, too
        self._binding: DelayedBinding | None = binding
        self._generation = binding.pair.generation
        binding.pair.in_flight += 1

    def backward_done(self) -> None:
        """Note that backward has finished.

        Raises RuntimeError where the scales were updated since the forward: the gradients are wrong then.
        """
        binding = self._close()
        if binding is None:
            return
        if binding.pair.generation != self._generation:
            raise RuntimeError(
                f"fp8 scales were updated between forward and backward of {self._scaling.name or 'a module'}; "
                "call fp8.new_step() only when every forward has had its backward"
            )
        if self._learns:
            binding.pair.done = self._generation

    def _close(self) -> DelayedBinding | None:
        binding, self._binding = self._binding, None
        if binding is not None:
            binding.pair.in_flight -= 1
            if self._learns:
                binding.done = self._generation
        return binding

    __del__ = _close  # the graph was dropped, or there was none (no_grad, or nothing to learn up to here)


def has_fp8_backward(quantizers: Sequence[GemmQuantizers] | None) -> bool:
    """Say whether attention with these quantizers, None for 16 bits, is in fp8 in backward too."""
    forward_pass = None if quantizers is None else quantizers[0].forward_pass
    return isinstance(forward_pass, ForwardPass) and forward_pass.recipe.fp8_dpa_bwd


class _Untracked:
    """The ForwardPass of recipes that have no state."""

    @staticmethod
    def backward_done() -> None:
        pass


class ModuleScaling:
    """The fp8 side of a layer with `num_gemms` GEMMs. Holds no tensors before its first use.

    update: how its backend updates scales, `ops.amax_and_scale_update`; see ScalingState.
    model: the Model whose scales are updated together with this module's; None: its scales are updated by themselves,
    to the same numbers, but with a kernel and a reduction of their own. `bind_model` sets it.
    name: the layer's structured name, its key in checkpoints; `name_modules` sets it.
    attention: it serves attention, and recipes with fp8_dpa only. As in TE attention counts as three GEMMs: inputs and
    output gradients are q, k, v together, the softmax, and the output; their weights' places stay empty.
    stored: a StoredWeight for each GEMM where the weights exist in fp8 only, else empty.
    """

    def __init__(
        self, num_gemms: int, update: Update, attention: bool = False, stored: Sequence[StoredWeight] = ()
    ) -> None:
        self.num_gemms = num_gemms
        self.update = update
        self.attention = attention
        self.stored = stored
        self.name: str | None = None
        self.model: Model | None = None
        self._bindings: dict[Recipe, Binding] = {}
        self._last: tuple[Recipe, Binding] | None = None  # of the last forward

    def __reduce__(self) -> tuple[Any, ...]:
        # a copied or unpickled layer has scales of its own, but for those of its weights
        return ModuleScaling, (self.num_gemms, self.update, self.attention, self.stored)

    @classmethod
    def of_attention(cls, update: Update) -> ModuleScaling:
        """Return the ModuleScaling of an attention."""
        return cls(3, update, attention=True)

    def serves(self, recipe: Recipe) -> bool:
        """Return whether the recipe has this module compute in fp8."""
        return not self.attention or recipe.fp8_dpa

    def begin_forward(
        self, training: bool = True, is_first_microbatch: bool | None = None
    ) -> tuple[GemmQuantizers, ...] | None:
        """Begin a forward: return a GemmQuantizers for each GEMM.

        Returns None outside `fp8_autocast`, and for attention under a recipe without fp8_dpa.

        is_first_microbatch: as `fp8.microbatch`, which gives the value for None.

        Under delayed scaling a training forward with is_first_microbatch None or True begins a new step and updates all
        scales of its model. It does so only if since the last update a module of the model has completed a backward,
        this module's latest pass has ended, with its backward or (in frozen first layers) without one, and no forward
        still waits for its backward. So scales are not updated by recompute, whose second forward comes before the
        backward, by evaluation (training False), which records no amax, or by a pipeline's forward while others are in
        flight.

        Raises RuntimeError for weights that exist in fp8 only outside `fp8_autocast`, and under a recipe that cannot
        read them.
        A pipeline schedule with recompute, or a module that runs twice a step, must say is_first_microbatch, or use
        `distributed.recompute`: by itself no module can tell a recomputed forward from the next step's.
        """
        context = autocast.get_autocast_state()
        if not context.enabled or not self.serves(context.recipe):
            if self.stored:
                raise RuntimeError(
                    f"the weights of {self.name or 'a layer'} exist in fp8 only: compute inside fp8_autocast"
                )
            return None
        if is_first_microbatch is None:
            is_first_microbatch = context.is_first_microbatch
        if self._last is None or context.recipe is not self._last[0]:
            self._last = context.recipe, self.bind(context.recipe)
        binding = self._last[1]
        gemms = binding.gemms if training else binding.evaluation_gemms
        if not isinstance(binding, DelayedBinding):
            return tuple([GemmQuantizers(gemm, _Untracked, is_first_microbatch) for gemm in gemms])
        state = binding.state
        if training:
            state.group = context.group
            if is_first_microbatch is not False and not context.in_recompute and binding.may_begin_step:
                state.begin_step(binding.pair)
            binding.pair.active, binding.done = True, None
        forward_pass = ForwardPass(self, binding, training)
        generation, group = binding.pair.generation, state.reduction_group()
        return tuple([GemmQuantizers(gemm, forward_pass, is_first_microbatch, generation, group) for gemm in gemms])

    def drop_weights(self) -> None:
        """Let go of the quantized weights that are kept for micro-batches to come."""
        for binding in self._bindings.values():
            for gemm in binding.gemms:
                gemm.cache.value = None

    def bind(self, recipe: Recipe) -> Binding:
        """Return the Binding for a recipe. Where there is none it is made, for the whole model at once."""
        if recipe not in self._bindings:
            modules = [self] if self.model is None else self.model.without_binding(recipe)
            for update in dict.fromkeys(module.update for module in modules):
                _bind_together([module for module in modules if module.update is update], recipe)
        return self._bindings[recipe]


class Model:
    """Modules whose scales are updated together, by one kernel and one reduction for each fp8 dtype."""

    def __init__(self, modules: Sequence[ModuleScaling]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        for module in modules:
            module.model = self

    def without_binding(self, recipe: Recipe) -> list[ModuleScaling]:
        """Return the modules that are still there, compute in fp8 under the recipe, and have no Binding for it yet."""
        alive = filter(None, (reference() for reference in self._modules))
        return [module for module in alive if module.serves(recipe) and recipe not in module._bindings]


def scaling_modules(root: nn.Layer) -> dict[str, ModuleScaling]:
    """Return {structured name: ModuleScaling} of all layers under `root`, itself included, that have one as `fp8`."""
    layers = root.named_sublayers(include_self=True)
    return {name: layer.fp8 for name, layer in layers if isinstance(getattr(layer, "fp8", None), ModuleScaling)}


def bind_model(root: nn.Layer) -> None:
    """Declare all layers under `root` to be one model, whose fp8 scales are updated together.

    TransformerLayer and PaddleNLP's models with these layers do so when they are built. Call it for your own model
    after it is built and before its first forward in fp8. Layers that have already run in fp8 keep their own scales.
    """
    Model(list(scaling_modules(root).values()))


def _bind_together(modules: Sequence[ModuleScaling], recipe: Recipe) -> None:
    """Make the modules' Bindings for a recipe; under delayed scaling they share blocks and have one `update`."""
    stored: list[Sequence[StoredWeight | None]] = [module.stored or [None] * module.num_gemms for module in modules]
    bindings: Sequence[Binding]
    if isinstance(recipe, DelayedScaling):
        state = scaling_state(modules[0].update, recipe)
        bindings = delayed = [DelayedBinding(recipe, each, state) for each in stored]
        state.add(delayed)
    else:
        bindings = [Binding(recipe, each) for each in stored]
    for module, binding in zip(modules, bindings, strict=True):
        module._bindings[recipe] = binding
