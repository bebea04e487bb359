"""Sharding and data parallelism whose communication overlaps with the backward pass, on nvgpu."""

from paddle.distributed.fleet.utils import tensor_fusion_helper


def allow_tensor_fusion():
    """Lets Paddle lay out on nvgpu, one behind the other, the gradients that it reduces together.

    Paddle 3.3 refuses devices that are not in this table of alignments in bytes; 256 is cudaMalloc's on every GPU.
    """
    tensor_fusion_helper.alignment.setdefault("nvgpu", 256)
