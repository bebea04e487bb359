"""Let the sends and receives of one batch progress together on nvgpu, as they do on Paddle's own GPU devices.

An interleaved pipeline's stages send along a ring before they receive. Paddle's process group of a custom device runs
the transfers of a batch one after another (ProcessGroup::StartCoalescing is empty there), and a large NCCL send ends
only with its receive, so every stage would wait for the next. Nothing is changed where the nvgpu plug-in is not loaded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from paddle_te import device
from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Virtual pipeline stages on nvgpu wait for each other for ever in their first step."


def _grouped(group: Group, tasks: object = None) -> AbstractContextManager[None]:
    # the transfers of a batch are all on the stream that computes: there are no tasks to wait for
    return device.nvgpu_section("group")


_replacement = Replacement(p2p_communication, "_coalescing_manager", _grouped)


def apply() -> None:
    """Apply the repair. Raises ValueError for a plug-in that is too old to group transfers."""
    device.check_nvgpu("group")
    if device.nvgpu_library():
        _replacement.apply()


undo = _replacement.undo
