"""Options that earlier versions had. For one minor version whoever still gives one is told so, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Removed:
    """since: the version without the option. nothing: the value that files of arguments may still have."""

    since: str
    nothing: object
    remedy: str = "delete it"


REMOVED = {
    "tp_comm_overlap": Removed("0.2.0", 0),
    "fuse_sequence_parallel_allreduce": Removed("0.2.0", False),
    "data_impl": Removed("0.2.0", "mmap"),
    "skip_warmup": Removed("0.2.0", True),
    "hidden_dropout_prob": Removed("0.2.0", 0.0),
    "attention_probs_dropout_prob": Removed("0.2.0", 0.0),
    "gemm_autotune": Removed("0.2.0", False),
    "cuda_graphs": Removed("0.2.0", False),
    "fuse_wgrad_accumulation": Removed("0.2.0", True),
    "fp8_first_step": Removed("0.2.0", "current"),
    "fp8_format": Removed("0.2.0", None, "delete it: HYBRID, and E4M3 with block scaling"),
    "fp8_amax_compute_algo": Removed("0.2.0", "max"),
    "fp8_margin": Removed("0.2.0", 0),
    "fp8_power_2_scale": Removed("0.2.0", True),
    "fp8_amax_epsilon": Removed("0.2.0", 0.0),
    "early_stopping": Removed("0.2.0", False, "delete it: --early_stopping_patience N says it"),
    "early_stopping_threshold": Removed("0.2.0", 0.0),
    "on_nan_limit": Removed("0.2.0", 10),
    "fewshot_as_multiturn": Removed("0.2.0", True, "delete it, or use paddle-te lm_eval, which has it"),
    "save_in_background": Removed("0.2.0", False, "delete it: --staging_dir /dev/shm says it"),
    "muon_momentum": Removed("0.2.0", 0.95),
    "decode_strategy": Removed("0.2.0", "greedy_search", "delete it: --temperature above 0 samples"),
    "STRAGGLER_STEPS": Removed("0.2.0", 100),
    "PROFILE_EMIT_NVTX": Removed("0.2.0", True, "delete it: nsys_profile always names ranges, by the package nvtx"),
}


def check_removed(names: Iterable[str]) -> None:
    """Raise ValueError for the first removed option among a command line's words, or the names of variables."""
    for word in names:
        name = word.partition("=")[0]
        if (option := REMOVED.get(name.removeprefix("--"))) is not None:
            raise ValueError(f"{name}: this option went with version {option.since}; {option.remedy}")


def without_removed(values: Mapping[str, object]) -> dict[str, object]:
    """Return a file's {name: value} without the removed options that ask for nothing.

    Raises:
        ValueError: one of them asks for something.
    """
    removed = [name for name in values if name in REMOVED]
    check_removed(name for name in removed if not asks_for_nothing(values[name], REMOVED[name].nothing))
    return {name: value for name, value in values.items() if name not in REMOVED}


def asks_for_nothing(value: object, nothing: object) -> bool:
    """Return whether a file's value is the one that asks for nothing, or another word for it."""
    return str(value).lower() in (str(nothing).lower(), "0", "none")
