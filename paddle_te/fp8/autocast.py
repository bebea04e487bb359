"""Tell layers whether fp8 is on, with which recipe and group, and which micro-batch of a step is running."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, NamedTuple

from paddle.distributed.communication.group import Group

from paddle_te.fp8.recipe import RECIPES, DelayedScaling, Recipe


class AutocastState(NamedTuple):
    """All that layers read from their surroundings.

    in_recompute: this forward is a recomputed one. stored_for: the recipe under which layers that are made now compute
    with weights that exist in fp8 only; None: their weights are not stored in fp8. keeps_transpose: `fp8_model_init`'s
    keep_transpose_cache.
    """

    enabled: bool = False
    recipe: Recipe = DelayedScaling()
    group: Group | None = None
    is_first_microbatch: bool | None = None
    in_recompute: bool = False
    stored_for: Recipe | None = None
    keeps_transpose: bool = False


# of this thread, the innermost last
_states: ContextVar[tuple[AutocastState, ...]] = ContextVar("_states", default=(AutocastState(),))


class _Scope(ContextDecorator):
    """Changes parts of the state while it is entered; may be entered again, also inside itself."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        states = _states.get()
        _states.set((*states, states[-1]._replace(**self._changes)))

    def __exit__(self, *_: object) -> None:
        _states.set(_states.get()[:-1])


def _recipe(name: str, given: Recipe | None) -> Recipe:
    """Return the given recipe, or the default for None. Raises TypeError for another kind."""
    recipe = AutocastState().recipe if given is None else given
    if not isinstance(recipe, tuple(RECIPES.values())):
        names = ", ".join(kind.__name__ for kind in RECIPES.values())
        raise TypeError(f"{name}={given!r}; it must be an object of one of {names}")
    return recipe


class fp8_autocast(_Scope):  # noqa: N801, TE's name
    """Context manager or decorator: GEMMs of te and pd layers inside run in fp8, when `enabled`.

    fp8_recipe: DelayedScaling (the default), Float8CurrentScaling or Float8BlockScaling.
    fp8_group: a paddle.distributed group whose ranks share amax under DelayedScaling; None: each rank its own.
        All its ranks must run the same layers in the same order: it may span tensor and data parallel ranks,
        never pipeline stages.

    Nests; leaving restores what was before. Raises TypeError for a recipe or a group of another kind.
    """

    def __init__(self, enabled: bool = True, fp8_recipe: Recipe | None = None, fp8_group: Group | None = None) -> None:
        fp8_recipe = _recipe("fp8_recipe", fp8_recipe)
        if fp8_group is not None and not hasattr(fp8_group, "nranks"):
            raise TypeError(f"fp8_group={fp8_group!r}; it must be a paddle.distributed group or None")
        super().__init__(enabled=bool(enabled), recipe=fp8_recipe, group=fp8_group)


class microbatch(_Scope):  # noqa: N801, beside fp8_autocast
    """Context manager: what layers take for is_first_microbatch where they are not told.

    True: the first micro-batch of an optimizer step: scales are updated, weights quantized and kept.
    False: a later one: the kept weights serve. None: every forward stands for itself and keeps nothing.
    Put forward and backward of the micro-batch inside, so that recompute sees the same.
    """

    def __init__(self, is_first: bool | None) -> None:
        if is_first not in (True, False, None):
            raise ValueError(f"is_first={is_first!r}; it must be True, False or None")
        super().__init__(is_first_microbatch=is_first)


class fp8_model_init(_Scope):  # noqa: N801, TE's name
    """Context manager: te and pd layers made inside have the weights of their GEMMs in fp8 only, when `enabled`.

    Such weights are frozen, as LoRA needs them. A layer quantizes each weight as soon as it is initialised, so only one
    weight of a model exists in its own precision at a time. The layers compute inside `fp8_autocast` only.

    recipe: `fp8_autocast`'s fp8_recipe. With Float8BlockScaling each block of a weight has a scale. With the other
    recipes a weight has one scale, and the layers may compute under any of these. Raises TypeError for another kind.
    keep_transpose_cache: te makes the transposed copy that backward reads once for each weight and keeps it, in one
    more byte a weight, instead of making it in each backward.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None, keep_transpose_cache: bool = False) -> None:
        recipe = _recipe("recipe", recipe)
        super().__init__(stored_for=recipe if enabled else None, keeps_transpose=keep_transpose_cache)


class autocast_state(_Scope):  # noqa: N801
    """Context manager that brings back a whole `get_autocast_state()`, for recompute outside the forward's context."""

    def __init__(self, state: AutocastState) -> None:
        super().__init__(**state._asdict())


def get_autocast_state() -> AutocastState:
    """Return the present AutocastState of this thread."""
    return _states.get()[-1]


def is_fp8_enabled() -> bool:
    """Return whether GEMMs run in fp8 here."""
    return get_autocast_state().enabled


def get_fp8_recipe() -> Recipe:
    """Return the recipe of the innermost fp8_autocast; outside of any, the default DelayedScaling()."""
    return get_autocast_state().recipe


def get_fp8_group() -> Group | None:
    """Return the amax group of the innermost fp8_autocast, None without."""
    return get_autocast_state().group
