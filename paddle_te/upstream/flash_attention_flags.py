"""FlashMask asks Paddle for flags that only its builds for CUDA have, and runs on nvgpu.

They stand then for what these builds begin with: attention whose gradients may differ from run to run (nvgpu's do not),
and the second generation of FlashAttention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle
from paddle.base import core, framework

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Attention with FlashMask's rows ends in a ValueError about a flag on nvgpu."

DEFAULTS = {"FLAGS_cudnn_deterministic": False, "FLAGS_flash_attn_version": 2}
_paddles = framework.get_flags


def apply() -> None:
    paddle.get_flags = framework.get_flags = _get_flags


def undo() -> None:
    paddle.get_flags = framework.get_flags = _paddles


def _get_flags(flags: str | Iterable[str]) -> dict[str, Any]:
    """Do as Paddle's."""
    names = [flags] if isinstance(flags, str) else list(flags)
    absent = {name: DEFAULTS[name] for name in names if name in DEFAULTS and not core.globals().is_public(name)}
    there = [name for name in names if name not in absent]
    return (_paddles(there) if there else {}) | absent
