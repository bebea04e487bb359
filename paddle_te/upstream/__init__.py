"""Repairs of Paddle's and PaddleNLP's code, and the only place that changes it.

Each repair is a module here with

- PACKAGE and VERSION: what it repairs, and the beginning of the version numbers that it was made for;
- SYMPTOM: what a user sees without it, in one sentence;
- apply() and undo(): each may be called twice.

Nothing happens when the modules are imported. The commands call `apply` once, before fleet is initialised, and log what
it returns; programs of their own, which train with these layers without our commands, do the same. One of them,
`deferred_imports`, must come before PaddleNLP is imported; the commands apply it first.
"""

import importlib
from importlib import metadata
from types import ModuleType

# In the order in which they are applied.
REPAIRS = (
    "deferred_imports",
    "threaded_store",
    "loader_thread",
    "store_address",
    "rng_tracker",
    "shared_weights",
    "pipeline_transfers",
    "sharding_alignment",
    "flash_attention_flags",
    "index_progress",
    "promotion_notices",
    "padding_slices",
    "remainder_gather",
    "averages",
    "expert_buckets",
    "gathering_order",
    "overwritten_main_grads",
    "stage2_storage",
    "stage2_averages",
    "stage3_storage",
    "stage3_prefetch",
    "stage3_gradients",
    "segment_exchange",
    "segment_gradient_norm",
)
# What to install instead of a version that the repairs were not made for.
REMEDY = "install paddlepaddle 3.3.1 and paddlenlp 3.0.0b4, with which they were tested (constraints.txt)"


def apply(*names: str) -> list[str]:
    """Apply the repairs of these names, or all of them.

    Returns: the names of those that were applied.

    Raises ValueError for an unknown name, or a version of Paddle or PaddleNLP that a repair was not made for.
    """
    chosen = [_repair(name) for name in names or REPAIRS]
    for module in chosen:
        check_version(module)
    for module in chosen:
        module.apply()
    return list(names or REPAIRS)


def undo(*names: str) -> None:
    """Take back the repairs of these names, or all of them."""
    for name in reversed(names or REPAIRS):
        _repair(name).undo()


def check_version(module: ModuleType) -> None:
    """Raise ValueError where the installed version is not one that the repair was made for."""
    installed = _installed_version(module.PACKAGE)
    if not installed.startswith(module.VERSION):
        name = module.__name__.rpartition(".")[2]
        raise ValueError(
            f"{module.PACKAGE} {installed} is installed, but the repair {name} was made for {module.VERSION}: {REMEDY}"
        )


def _installed_version(package: str) -> str:
    if package == "paddlenlp":
        return metadata.version(package)  # without importing it, for the repair that comes before
    import paddle

    return paddle.__version__  # which several distributions have


def _repair(name: str) -> ModuleType:
    if name not in REPAIRS:
        raise ValueError(f"{name}: there is no such repair; there are {', '.join(REPAIRS)}")
    return importlib.import_module(f"{__name__}.{name}")
