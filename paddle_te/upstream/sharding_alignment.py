"""Let Paddle lay gradients that it reduces together into one buffer on nvgpu.

It refuses devices that are not in its table of alignments in bytes; 256 is cudaMalloc's on every GPU.
"""

from paddle.distributed.fleet.utils import tensor_fusion_helper

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Sharding with overlap ends in a KeyError on nvgpu."


def apply() -> None:
    tensor_fusion_helper.alignment["nvgpu"] = 256


def undo() -> None:
    tensor_fusion_helper.alignment.pop("nvgpu", None)
