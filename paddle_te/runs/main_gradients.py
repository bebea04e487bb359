"""Decide who adds up gradients in float32, and where. The launcher, the scripts and the planner go by it."""

from __future__ import annotations

from typing import Protocol


class Flags(Protocol):
    """The flags of a script that decide. fuse_wgrad_accumulation: None where it is not given."""

    transformer_engine_backend: str
    amp_master_grad: bool | None
    fuse_wgrad_accumulation: bool | None


def launcher_keeps_them(device: str, precision: str, world: int, optimizer_in_backward: str = "off") -> bool:
    """Return whether the launcher asks for --amp_master_grad: for 16-bit weights over several devices of nvgpu.

    Paddle clips no bf16 gradients of parallel models there, unless the optimizer is ours. An update in backward uses
    each gradient at once and keeps none.
    """
    return device == "nvgpu" and precision != "fp32" and world > 1 and optimizer_in_backward == "off"


def adds_in_gemms(flags: Flags) -> bool:
    """Return whether GEMMs add weight gradients to the main gradients: where both can be, unless a flag says no."""
    return flags.transformer_engine_backend == "transformer_engine" and bool(flags.amp_master_grad)
