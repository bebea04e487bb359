"""The memory of GPUs and the rates that they reach.

The H200's numbers were measured with this project (benchmarks/). Most of the H100's are copies of the H200's. The
planner's results with them were compared with whole steps on H100s.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from paddle_te.runs import nvidia


def number(what: str, **more: Any) -> Any:
    """Return a field of a Gpu, with the words that tables say about it."""
    return field(metadata={"what": what}, **more)


@dataclass(frozen=True)
class Gpu:
    """Units: GB, GB/s in one direction, µs, TFLOP/s, and ms where it says so."""

    title: str = number("")
    measured: bool = number("whether the numbers below were measured, or taken over from another GPU")
    steps: str = number("what measured whole steps say of numbers that were taken over")
    memory: float = number("GB that tensors may take, what CUDA and the libraries keep taken off")
    host: float = number("GB of the host's memory that may be pinned for each GPU; assumed")
    hbm: float = number("reached by element-wise kernels")
    hbm_lora: float = number("by those of a layer with LoRA: fitted to whole steps, on both GPUs alike")
    update: float = number("reached by AdamW of all weights and the norm of all gradients (measured: 3800 to 4200)")
    update_bfloat16: float = number("ms of AdamW of 1e9 weights with moments in bfloat16, which are rounded at random")
    update_int8: float = number("ms of AdamW of 1e9 weights with moments in 8 bits, whose arithmetic takes that long")
    gemm_bf16: float = number("reached by a layer's GEMMs in a running step, at the power limit")
    gemm_fp8: float = number("likewise in fp8")
    attention_bf16: float = number("by causal attention, forward and backward, half of the products counted")
    attention_fp8: float = number("likewise with --fp8_dpa")
    head_bf16: float = number("by lm_head's GEMMs")
    head_fp8: float = number("likewise with --fp8_lm_head")
    gpus_per_node: int = number("joined by NVLink; nodes are joined by InfiniBand")
    nvlink: float = number("reached in collectives, of 450 (measured between four GPUs: 290 to 300)")
    nvlink_of_two: float = number("reached between two GPUs (measured: 214 in messages of 64 MiB, 229 in 128)")
    network: float = number("InfiniBand, per GPU, reached of 50 (400 Gbit/s, a card for each GPU); not measured")
    pcie: float = number("between device and pinned host memory, of 63 (PCIe 5.0 x16), in both directions at once")
    collective: float = number("µs that each collective takes besides its bytes and hops")
    nvlink_hop: float = number("latency of a step of a ring within a node; not measured")
    network_hop: float = number("and between nodes; not measured")
    overlap: float = number("share of sharding's communication that can run at the same time as computation")
    slowdown: float = number("of what runs at the same time: it takes SMs and bandwidth (measured: 0.2 to 0.35)")
    tp_overlap: float = number(
        "of the collectives that run during backward's GEMMs: gained, as these get slower (measured at TP4)"
    )
    launch: float = number("ms that the CPU takes to launch a layer, forward and backward; differs between machines")
    gap: float = number("ms of a step in which the GPU waits for the trainer, which reads the loss (measured: 2)")
    bucket: float = number("bytes of bf16 weights that are gathered, or whose gradients are reduced, at once")

    def is_called(self, name: str) -> bool:
        """Return whether a driver's name means this GPU: a GH200 is no H200, and an H100 NVL has more memory."""
        return re.search(rf"\b{self.title}\b(?! NVL)", name) is not None


_H200 = Gpu(
    title="H200",
    measured=True,
    steps="",
    memory=145.5,
    host=64,
    hbm=3400,
    hbm_lora=2800,
    update=4150,
    update_bfloat16=4.7,
    update_int8=12,
    gemm_bf16=690,
    gemm_fp8=1200,
    attention_bf16=430,
    attention_fp8=600,
    head_bf16=780,
    head_fp8=1400,
    gpus_per_node=8,
    nvlink=300,
    nvlink_of_two=220,
    network=45,
    pcie=48,
    collective=20,
    nvlink_hop=1,
    network_hop=5,
    overlap=0.9,
    slowdown=0.35,
    tp_overlap=0.4,
    launch=1.0,
    gap=2,
    bucket=256e6,
)
# The same tensor cores, power limit and links, but 80 GB of 3.35 TB/s instead of 141 GB of 4.8 TB/s.
_H100 = replace(
    _H200,
    title="H100",
    measured=False,
    steps="23 steps that were measured on one and two differ by at most 7 % in time, 1 % in memory",
    memory=79.5,
    hbm=2400,
    update=2900,
    update_bfloat16=6.0,
)
GPUS = {"h200": _H200, "h100": _H100}


def called(names: Collection[str]) -> str | None:
    """Return the name of GPUS for which a driver has these names; None without a GPU and for other GPUs."""
    return next((key for key, gpu in GPUS.items() if names and all(map(gpu.is_called, names))), None)


def at_hand() -> str:
    """Return the name of GPUS for this machine's GPUs; the first of GPUS without a GPU and for other GPUs."""
    return called(nvidia.names(nvidia.listing())) or next(iter(GPUS))
