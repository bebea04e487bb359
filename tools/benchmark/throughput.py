"""Measures training end to end: starts llm/llama/run_pretrain.py or run_finetune.py through its launcher, and reads
what it logs. Pretraining's peer is torchtitan's own trainer, with torch.compile and torchao's float8. Runs whose names
begin with formers train the same in PaddleFormers.

    python tools/benchmark/throughput.py [--runs 8b-x4 titan-8b-l16-x1 ...] [--largest_batch 8b-l16-x1] [--output FILE]

Each run trains a model from random weights on random tokens for a few steps, without checkpoints or evaluation. Runs
follow each other in the order in which they are named; without --runs all of run_pretrain.py's that the GPUs suffice
for. Writes benchmarks/throughput/<date>_<gpu>x<n>_<what>.json and a table of the same name, anew after each run. A run
that fails, or whose framework is not there, keeps its row with the reason.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Condition, Lock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te.launch.machines import visible_devices  # noqa: E402
from paddle_te.launch.overlap import OVERLAPS  # noqa: E402
from paddle_te.options.scripts import RECOMPUTE_MODULES  # noqa: E402
from tools.benchmark import finetuning, report, step, timeline  # noqa: E402
from tools.benchmark.formers import FormersRun  # noqa: E402
from tools.benchmark.parallel import packages  # noqa: E402
from tools.benchmark.problem import GPT, QWEN2, SIZES, Dims  # noqa: E402
from tools.benchmark.titan import TitanRun  # noqa: E402
from tools.benchmark.trainings import Conditions, Run, python_path, quoted, step_times  # noqa: E402

LLAMA_3_8B = replace(step.SIZES["8b-s8192"], layers=32)
LLAMA_3_70B = step.Size(Dims(1, 4096, 8192, 28672, 64, 8, 500000.0), 128256, layers=80)
LLAMA_32_1B = replace(step.SIZES["1b-s1024"], dims=replace(step.LLAMA_1B, sequence=2048), tied=True)  # Llama-3.2-1B
LLAMA_2_7B = replace(step.SIZES["7b-s4096"], layers=32)
LLAMA_2_13B = step.Size(Dims(1, 4096, 5120, 13824, 40, 40, 10000.0), 32000, layers=40)
QWEN2_7B_16 = step.SIZES["qwen2.5-7b-s4096"]
LLAMA_3_2_3B = step.Size(Dims(1, 4096, 3072, 8192, 24, 8, 500000.0), 128256, layers=28, tied=True)
LLAMA_3_2_1B = step.Size(Dims(1, 32768, 2048, 8192, 32, 8, 500000.0), 128256, layers=16, tied=True)
QWEN2_3B = step.Size(
    Dims(1, 8192, 2048, 11008, 16, 2, 1e6, variant=QWEN2), 151936, layers=36, family="qwen2", tied=True
)
GPT_1_3B = step.Size(Dims(1, 2048, 2048, 8192, 16, 16, None, variant=GPT), 50304, layers=24, family="gpt", tied=True)
GPT_5B = step.Size(SIZES["gpt-5b"], 50304, layers=24, family="gpt")  # without dropout

# run_pretrain's flags. Weight gradients are added to float32 main gradients inside the GEMMs.
MAIN_GRADS = "--amp_master_grad true"
# One process frees them after a step, so that the next one writes them instead of clearing and adding.
MAIN_GRADS_ALONE = f"{MAIN_GRADS} --release_grads true"
FUSED_LOSS = "--use_fused_linear_cross_entropy true"
FP8_HEAD = "--fp8_lm_head true"
FP8_ATTENTION = "--fp8_dpa true"
# AdamW's state in 6 bytes a parameter; the master weights keep float32's precision.
COMPACT = "--optim_moments bfloat16 --master_weights bf16_remainder"
# A weight is updated as soon as its gradient is there, which is then let go.
# In 4 bytes, with which the update takes longer.
INT8 = "--optim_moments int8 --master_weights bf16_remainder"
IN_BACKWARD = "--optimizer_in_backward last_norm"
# What costs least of what a layer can keep less for backward: the input of SwiGLU in fp8, norms and SwiGLU again.
STORED = "--activation_func_fp8_input_store true"
NEARLY_FREE = "--recompute_modules layernorm mlp_act"
# Gradients are reduced and scattered during backward, weights gathered during the next forward, for which Paddle wants
# the loss to be read not in each step. Stage 2 likewise: reduced during backward, broadcast during forward.
OVERLAP_1, OVERLAP_2 = (
    f"{MAIN_GRADS} --logging_steps 2 --sharding_parallel_config {shlex.quote(OVERLAPS[stage])}"
    for stage in ("stage1", "stage2")
)
# paddle.DataParallel reduces bf16 gradients during backward.
DATA_PARALLEL = "--amp_master_grad false"

EIGHT_B = Run(LLAMA_3_8B, flags=MAIN_GRADS)
EIGHT_B_16 = replace(EIGHT_B, size=replace(LLAMA_3_8B, layers=16))
EIGHT_B_ACCUMULATED = replace(EIGHT_B, size=replace(LLAMA_3_8B, micro_batches=16))
ALONE, ALONE_MAIN = "8b-l16-x1", "8b-l16-x1-main-grads"
SEVEN_B = Run(LLAMA_2_7B, batch=2, flags=MAIN_GRADS)


def sharded(run, gpus, **more):
    """The run over so many GPUs with sharding, whose communication overlaps."""
    return replace(run, **dict(gpus=gpus, sharding=gpus, flags=OVERLAP_1) | more)


def long_sequences(thousands):
    """{name: run} of sequences of so many times 1024 tokens: on one GPU, and shared by two in either way."""
    size = replace(EIGHT_B_16.size, dims=replace(LLAMA_3_8B.dims, sequence=1024 * thousands))
    name = f"8b-l16-{thousands}k"
    alone = Run(size, recompute="full", flags=FUSED_LOSS)
    shared = replace(alone, gpus=2, flags=f"{MAIN_GRADS} {FUSED_LOSS}", base=f"{name}-x1")
    return {
        f"{name}-x1": alone,
        f"{name}-x2-sep2": replace(shared, sep=2),
        f"{name}-x2-cp2": replace(shared, cp=2),
        f"{name}-x1-dpa": replace(alone, flags=f"{FUSED_LOSS} {FP8_ATTENTION}"),
        f"{name}-x2-sep2-dpa": replace(
            shared, sep=2, flags=f"{MAIN_GRADS} {FUSED_LOSS} {FP8_ATTENTION}", base=f"{name}-x1-dpa"
        ),
    }


# What backward computes again at each length, in thousands of tokens, so that it is the least with which one H200 holds
# 16 layers with a compact state.
MLP_AGAIN = "--recompute_modules layernorm mlp"
MLP_CHUNKS = "--mlp_chunk_tokens 16384"
FROM_8K_TO_128K = {8: "", 16: "", 32: "", 64: MLP_AGAIN, 128: f"{MLP_AGAIN} {MLP_CHUNKS}"}


def fastest_of_length(thousands):
    """{name: run} of one GPU with the flags that are fastest for sequences of so many times 1024 tokens."""
    size = replace(EIGHT_B_16.size, dims=replace(LLAMA_3_8B.dims, sequence=1024 * thousands))
    flags = [FUSED_LOSS, FP8_ATTENTION, COMPACT, FROM_8K_TO_128K[thousands]]
    return {f"8b-l16-{thousands}k-x1-fastest": Run(size, flags=" ".join(filter(None, flags)))}


def chunks_compared(name):
    """{name: run}: one of `long_sequences` with the MLP in chunks."""
    run = OUR_RUNS[name]
    return {f"{name}-chunks": replace(run, flags=f"{run.flags} {MLP_CHUNKS}", base=name)}


# In the order in which they are worth the machine's time.
OUR_RUNS = {
    "8b-x4": sharded(EIGHT_B, 4),
    "8b-x4-fused-loss": sharded(EIGHT_B, 4, flags=f"{OVERLAP_1} {FUSED_LOSS}"),
    "8b-x4-fp8-head-dpa": sharded(EIGHT_B, 4, flags=f"{OVERLAP_1} {FP8_HEAD} {FP8_ATTENTION}"),
    ALONE_MAIN: replace(EIGHT_B_16, flags=MAIN_GRADS_ALONE),
    "8b-l16-x4": sharded(EIGHT_B_16, 4, base=ALONE_MAIN),
    "8b-l16-x2": sharded(EIGHT_B_16, 2, base=ALONE_MAIN),
    ALONE: replace(EIGHT_B_16, flags=""),
    "8b-l16-x4-dp": replace(EIGHT_B_16, gpus=4, flags=DATA_PARALLEL, base=ALONE),
    "8b-l16-x2-dp": replace(EIGHT_B_16, gpus=2, flags=DATA_PARALLEL, base=ALONE),
    # All of Llama-3-8B over two GPUs: with stage 1 each would hold 32 GB of float32 main gradients, which is too much.
    "8b-x2-stage2": sharded(EIGHT_B, 2, stage="stage2", flags=f"{OVERLAP_2} {FUSED_LOSS}"),
    "8b-x2-stage2-fp8-head": sharded(EIGHT_B, 2, stage="stage2", flags=f"{OVERLAP_2} {FP8_HEAD}"),
    "8b-x2-stage2-bf16": sharded(EIGHT_B, 2, precision="bf16", stage="stage2", flags=f"{OVERLAP_2} {FUSED_LOSS}"),
    "8b-x2-stage3": sharded(EIGHT_B, 2, stage="stage3", flags=f"{MAIN_GRADS} {FUSED_LOSS}"),
    "8b-x2-accumulated": sharded(EIGHT_B_ACCUMULATED, 2, stage="stage2", flags=f"{OVERLAP_2} {FUSED_LOSS}"),
    "8b-x2-accumulated-current": sharded(
        EIGHT_B_ACCUMULATED, 2, stage="stage2", flags=f"{OVERLAP_2} {FUSED_LOSS} --fp8_recipe current"
    ),
    "8b-x2-accumulated-fp8-head-dpa": sharded(
        EIGHT_B_ACCUMULATED, 2, stage="stage2", flags=f"{OVERLAP_2} {FP8_HEAD} {FP8_ATTENTION}"
    ),
    # Stage 1 reduces gradients once a step, stage 2 after each micro-batch. Their float32 fits with a compact state.
    "8b-x2-accumulated-stage1": sharded(EIGHT_B_ACCUMULATED, 2, flags=f"{OVERLAP_1} {COMPACT}"),
    "8b-x2-accumulated-stage1-current": sharded(
        EIGHT_B_ACCUMULATED, 2, flags=f"{OVERLAP_1} {COMPACT} --fp8_recipe current"
    ),
    "8b-x2-accumulated-stage1-fp8-head-dpa": sharded(
        EIGHT_B_ACCUMULATED, 2, flags=f"{OVERLAP_1} {COMPACT} {FP8_HEAD} {FP8_ATTENTION}"
    ),
    # All of Llama-3-8B on one GPU: without recompute, and four sequences a step with it.
    "8b-x1-compact": replace(EIGHT_B, flags=f"{FUSED_LOSS} {COMPACT}"),
    "8b-x1-compact-full": replace(EIGHT_B, batch=4, recompute="full", flags=f"{FUSED_LOSS} {COMPACT}"),
    "8b-x1-optimizer-in-backward": replace(EIGHT_B, flags=f"{COMPACT} {IN_BACKWARD}"),
    # With float32 states parts of the layers must be computed again, or fewer parts, and the activations of some layers
    # be in host memory; then what these alone cost.
    "8b-x1-optimizer-in-backward-float32": replace(EIGHT_B, flags=f"{IN_BACKWARD} --recompute_modules layernorm mlp"),
    "8b-x1-offload-float32": replace(
        EIGHT_B, flags=f"{IN_BACKWARD} {FUSED_LOSS} --recompute_modules layernorm mlp_act --offload_activations 5"
    ),
    # The master weights keep float32's precision: nothing is computed again, and with all states in float32 what is
    # nearly free. Then what the former costs with SwiGLU's input in bf16.
    "8b-x1-stored": replace(EIGHT_B, flags=f"--master_weights bf16_remainder {STORED}"),
    "8b-x1-stored-float32": replace(EIGHT_B, flags=f"{IN_BACKWARD} {FUSED_LOSS} {STORED} {NEARLY_FREE}"),
    "8b-x1-not-stored": replace(EIGHT_B, flags="--master_weights bf16_remainder", base="8b-x1-stored"),
    # Two sequences at a time with a compact state.
    "8b-x1-stored-2-rows": replace(EIGHT_B, batch=2, flags=f"{FUSED_LOSS} {COMPACT} {STORED}"),
    # States of the optimizer in host memory, whose copies several micro-batches or backward must hide.
    "8b-x1-offload-optimizer": replace(
        EIGHT_B, size=replace(LLAMA_3_8B, micro_batches=4), flags="--offload_optimizer 0.45"
    ),
    "8b-x1-offload-optimizer-in-backward": replace(EIGHT_B, flags=f"{IN_BACKWARD} --offload_optimizer 0.2"),
    "8b-x1-offload": replace(
        EIGHT_B, flags=f"{COMPACT} {IN_BACKWARD} --offload_activations 5", base="8b-x1-optimizer-in-backward"
    ),
    "13b-x2-compact": sharded(Run(LLAMA_2_13B), 2, stage="stage2", flags=f"{OVERLAP_2} {FUSED_LOSS} {COMPACT}"),
    "8b-x2-tp2": replace(EIGHT_B, gpus=2, tp=2, sequence_parallel=True, batch=2, flags=MAIN_GRADS_ALONE),
    "7b-x2": sharded(SEVEN_B, 2),
    "8b-x4-bf16": sharded(EIGHT_B, 4, precision="bf16"),
    "8b-x4-accumulated": sharded(replace(EIGHT_B, size=replace(LLAMA_3_8B, micro_batches=4)), 4),
    "8b-x4-tp4": replace(EIGHT_B, gpus=4, tp=4, sequence_parallel=True, batch=4, flags=MAIN_GRADS_ALONE),
    "8b-x4-tp2-stage1": sharded(EIGHT_B, 4, sharding=2, tp=2, sequence_parallel=True, batch=2),
    "8b-x4-stage1": sharded(EIGHT_B, 4, flags=MAIN_GRADS),
    "8b-x4-stage2": sharded(EIGHT_B, 4, stage="stage2", flags=MAIN_GRADS),
    "8b-x4-stage2-overlap": sharded(EIGHT_B, 4, stage="stage2", flags=OVERLAP_2),
    "8b-x4-stage3": sharded(EIGHT_B, 4, stage="stage3", flags=MAIN_GRADS),
    "8b-l16-x1-fused-loss": replace(EIGHT_B_16, flags=FUSED_LOSS),
    "8b-l16-x1-fp8-head": replace(EIGHT_B_16, flags=FP8_HEAD),
    "8b-l16-x1-fp8-head-dpa": replace(EIGHT_B_16, flags=f"{FP8_HEAD} {FP8_ATTENTION}"),
    "8b-l16-x1-bf16": replace(EIGHT_B_16, precision="bf16", flags=""),
    "8b-l16-x1-fp8-head-dpa-compact": replace(EIGHT_B_16, flags=f"{FP8_HEAD} {FP8_ATTENTION} {COMPACT}"),
    "8b-l16-x1-bf16-compact": replace(EIGHT_B_16, precision="bf16", flags=COMPACT),
    "8b-l16-x2-bf16": sharded(EIGHT_B_16, 2, precision="bf16"),
    "7b-x4": sharded(SEVEN_B, 4),
    "7b-l16-x1": replace(SEVEN_B, size=replace(LLAMA_2_7B, layers=16), flags=""),
    "7b-l16-x1-bf16": replace(SEVEN_B, size=replace(LLAMA_2_7B, layers=16), precision="bf16", flags=""),
    "qwen2.5-7b-l16-x1": Run(QWEN2_7B_16, batch=2),
    "qwen2.5-7b-l16-x1-bf16": Run(QWEN2_7B_16, precision="bf16", batch=2),
    # So little work for the GPU that it may wait for the host.
    "1b-x1": Run(LLAMA_32_1B),
    "1b-x1-main-grads": Run(LLAMA_32_1B, flags=MAIN_GRADS_ALONE),
    "1b-x1-released": Run(LLAMA_32_1B, flags="--release_grads true"),
    "gpt-5b-x1": Run(GPT_5B, batch=GPT_5B.dims.batch),
    "gpt-5b-x1-bf16": Run(GPT_5B, precision="bf16", batch=GPT_5B.dims.batch),
}
# Models, lengths and options that were new to the planner when they were chosen: benchmarks/scaling has what it had
# computed before they ran.
OUR_RUNS |= {
    "llama-3.2-3b-x1": Run(LLAMA_3_2_3B, batch=3),
    "llama-3.2-1b-32k-x1": Run(
        LLAMA_3_2_1B, flags=f"{FUSED_LOSS} --recompute_modules layernorm mlp_act", recompute="core_attn"
    ),
    "qwen2.5-3b-x1-bf16": Run(QWEN2_3B, precision="bf16", recompute="full", batch=2),
    "gpt-1.3b-x1": Run(GPT_1_3B, batch=8, flags="--optim_moments bfloat16"),
    "7b-l24-2k-x1": Run(
        replace(LLAMA_2_7B, dims=replace(LLAMA_2_7B.dims, sequence=2048), layers=24, micro_batches=3),
        batch=4,
        flags=f"{MAIN_GRADS_ALONE} --recompute_modules layernorm mlp",
    ),
}
# What backward computes again, and what that costs: each part alone, beside 8b-l16-x1.
OUR_RUNS |= {
    f"{ALONE}-{part.replace('_', '-')}": replace(EIGHT_B_16, flags=f"--recompute_modules {part}", base=ALONE)
    for part in RECOMPUTE_MODULES
}
OUR_RUNS[f"{ALONE}-full"] = replace(EIGHT_B_16, flags="", recompute="full", base=ALONE)
for thousands in (32, 64, 128):
    OUR_RUNS |= long_sequences(thousands)
for thousands in FROM_8K_TO_128K:
    OUR_RUNS |= fastest_of_length(thousands)
OUR_RUNS |= chunks_compared("8b-l16-64k-x1-dpa") | chunks_compared("8b-l16-128k-x1-dpa")
# The same length with the MLP at once, for which gradients of one layer at a time make room.
OUR_RUNS["8b-l16-128k-x1-at-once"] = replace(
    OUR_RUNS["8b-l16-128k-x1-fastest"],
    flags=f"{FUSED_LOSS} {FP8_ATTENTION} {COMPACT} {MLP_AGAIN} {IN_BACKWARD}",
    base="8b-l16-128k-x1-fastest",
)
# All 32 layers at the greatest length on two GPUs, which share weights, states and tokens.
OUR_RUNS["8b-128k-x2-tp2"] = Run(
    replace(LLAMA_3_8B, dims=replace(LLAMA_3_8B.dims, sequence=131072)),
    gpus=2,
    tp=2,
    sequence_parallel=True,
    flags=f"{FUSED_LOSS} {FP8_ATTENTION} {COMPACT} {MLP_AGAIN} {MLP_CHUNKS}",
)
# All of Llama-3-8B on H100s of 80 GB, in the layouts that the planner finds.
ON_H100S = dict(gpus=2, size=replace(LLAMA_3_8B, micro_batches=32))
TP_2, PP_2 = dict(tp=2, sequence_parallel=True), dict(pp=2)
OUR_RUNS |= {
    "8b-l16-x1-compact": replace(EIGHT_B_16, flags=COMPACT),
    "8b-x1-compact-mlp-again": replace(
        EIGHT_B, flags=f"{FUSED_LOSS} {COMPACT} --recompute_modules layernorm mlp --offload_optimizer 0.06"
    ),
    "8b-x1-compact-accumulated": replace(
        EIGHT_B_ACCUMULATED, flags=f"{COMPACT} {NEARLY_FREE} --offload_optimizer 0.99"
    ),
    "8b-x1-int8-in-backward": replace(
        EIGHT_B, flags=f"{FUSED_LOSS} {INT8} {IN_BACKWARD} {NEARLY_FREE} --offload_activations 5"
    ),
    "8b-x2-tp2-accumulated": replace(EIGHT_B, flags=COMPACT, **ON_H100S, **TP_2),
    "8b-x2-pp2-int8": replace(EIGHT_B, flags=f"{INT8} {NEARLY_FREE}", **ON_H100S, **PP_2),
    "8b-x2-pp2-int8-fp8-head-dpa": replace(
        EIGHT_B, flags=f"{INT8} {NEARLY_FREE} {FP8_HEAD} {FP8_ATTENTION}", **ON_H100S, **PP_2
    ),
}
# The same sizes and tokens a step as ours of like names; all 32 layers fit on two GPUs.
TITAN_RUNS = {
    f"titan-{name}{suffix}": TitanRun(size, gpus, precision)
    for name, size, gpus in (
        ("8b-l16-x1", EIGHT_B_16.size, 1),
        ("8b-l16-x2", EIGHT_B_16.size, 2),
        ("8b-x2", LLAMA_3_8B, 2),
    )
    for suffix, precision in (("", "fp8 tensorwise"), ("-rowwise", "fp8 rowwise"), ("-bf16", "bf16"))
}
# The same as ours of like names, in another host.
FORMERS_RUNS = {
    "formers-8b-l16-x1": FormersRun(EIGHT_B_16.size, base=ALONE),
    "formers-8b-l16-x1-bf16": FormersRun(EIGHT_B_16.size, precision="bf16", base="8b-l16-x1-bf16"),
}
FINETUNED_7B = finetuning.Finetuning(LLAMA_2_7B)
FINETUNING_RUNS = {
    f"{name}{suffix}": replace(run, packed=packed, batch=batch)
    for name, run, rows in (
        ("sft-7b-x2", sharded(FINETUNED_7B, 2), 4),
        ("lora-7b-x1", replace(FINETUNED_7B, method="lora", flags="--lora_rank 16"), 4),
    )
    for suffix, packed, batch in (("", True, 1), ("-unpacked", False, rows))
}
# All weights on one GPU, 16 packed rows a GPU and step as in NeMo's recipe for eight (global batch 128, micro-batch 1),
# and two rows at a time.
SFT_ALONE = replace(FINETUNED_7B, on_device=True, flags=f"{MAIN_GRADS_ALONE} {COMPACT}")
FINETUNING_RUNS |= {
    name: replace(SFT_ALONE, size=replace(LLAMA_2_7B, micro_batches=16 // rows), batch=rows)
    for name, rows in (("sft-7b-x1", 1), ("sft-7b-x1-2-rows", 2))
}
# The frozen base in fp8 only beside bf16, and the largest that one GPU holds. Their weights are made on the device.
LORA = finetuning.Finetuning(LLAMA_3_8B, method="lora", on_device=True, flags="--lora_rank 16")
LORA_FP8 = replace(LORA, fp8_base=True, base="lora-8b-x1")
BLOCK_SCALING = "--fp8_recipe block --pad_to_multiple_of 128"
FINETUNING_RUNS |= {
    "lora-8b-x1": LORA,
    "lora-8b-x1-fp8-base": LORA_FP8,
    "lora-8b-x1-fp8-base-block": replace(LORA_FP8, flags=f"{LORA.flags} {BLOCK_SCALING}"),
    # The same with less kept for backward: half of the memory that a bf16 base takes; and what parts of it save.
    "lora-8b-x1-fp8-base-lean": replace(LORA_FP8, flags=f"{LORA.flags} {STORED} {NEARLY_FREE}"),
    "lora-8b-x1-fp8-base-again": replace(LORA_FP8, flags=f"{LORA.flags} {NEARLY_FREE}"),
    "lora-8b-x1-fp8-base-stored": replace(LORA_FP8, flags=f"{LORA.flags} {STORED}"),
    "lora-8b-x1-fp8-base-leanest": replace(LORA_FP8, flags=f"{LORA.flags} {STORED} {NEARLY_FREE} {FUSED_LOSS}"),
    "lora-7b-x1-fp8-base": replace(LORA_FP8, size=LLAMA_2_7B, base="lora-7b-x1"),
    "lora-7b-x1-fp8-base-2-rows": replace(LORA_FP8, size=LLAMA_2_7B, batch=2, base="lora-7b-x1"),
    "lora-70b-x1-fp8-base": replace(
        LORA_FP8, size=LLAMA_3_70B, base=None, recompute="full", flags=f"{LORA.flags} {FUSED_LOSS}"
    ),
}
FINETUNING_RUNS["lora-70b-x1-fp8-base-lean"] = replace(
    FINETUNING_RUNS["lora-70b-x1-fp8-base"],
    recompute="none",
    flags=f"{LORA.flags} {STORED} {NEARLY_FREE}",
    base="lora-70b-x1-fp8-base",
)
RUNS = OUR_RUNS | FORMERS_RUNS | FINETUNING_RUNS | TITAN_RUNS
TRY_STEPS = 3  # of each try for the largest batch: the second step has all optimizer states, a third shows it stays

DEFINITIONS = [
    "Runs of paddle_te are llm/llama/run_pretrain.py with all that belongs to it: Trainer, data loading, clipping, "
    "AdamW with float32 master weights, logging. Random tokens and weights; per-GPU batches of `batch` sequences.",
    "ms: median of the steady steps' wall time as the run logs it (with overlap: mean of two steps); range: the "
    "least and the greatest. TFLOP/s: 6 per token and weight multiplied, and attention's products, halved by the "
    "causal mask; recomputation not counted. Scaling: tokens/s per GPU over those of the run it names.",
    "Peak GB: of the first rank, by Paddle's allocator. Loss: first and last that was logged. Start: seconds of the "
    "run that were not steps.",
]
TITAN_DEFINITION = (
    "Runs of torchtitan are its own trainer with torch.compile, and FSDP on several GPUs, on as many random tokens. "
    "fp8 is torchao's float8 for all linear layers but lm_head, scaled by the current values of a tensor or row. Not "
    "like for like: torchtitan keeps its weights in float32, paddle_te in bf16 with float32 master weights. "
    "torchtitan's times are means of two steps; compiling counts for its first step, so not for start. Its peak GB "
    "are what PyTorch's allocator had reserved, hence somewhat more than what its tensors took."
)

FORMERS_DEFINITION = (
    "Runs of paddle_te in PaddleFormers are its own Trainer and recipe with our decoder layers, on random tokens in an "
    "indexed corpus of one document. It waits for the loss in each step before it updates the weights."
)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=12, help="of a run; default %(default)s")
    parser.add_argument("--warmup", type=int, default=4, help="steps left out at its beginning; default %(default)s")
    parser.add_argument(
        "--largest_batch",
        choices=[name for name, run in RUNS.items() if run.gpus == 1],
        metavar="NAME",
        help="also find this run's largest batch for each recompute mode",
    )
    parser.add_argument("--at_once", action="store_true", help="as many runs at the same time as there are GPUs for")
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="further steps, whose time (but the first's) is accounted for by parts of the model, communication and "
        "gaps (timeline.py)",
    )
    parser.add_argument(
        "--torchtitan",
        type=Path,
        metavar="FOLDER",
        help="folder with torchtitan, torchao and what they import besides PyTorch, searched in place of PYTHONPATH; "
        "default: where Python finds them by itself",
    )
    parser.add_argument(
        "--paddleformers",
        type=Path,
        metavar="PYTHON",
        help="the interpreter of an environment with PaddleFormers, for the runs in that host",
    )
    parser.add_argument("--timeout", type=float, default=180, help="seconds for a run; default %(default)s")
    report.add_destination(parser, "throughput")
    parser.add_argument("--logs", type=Path, help="folder to keep the runs' outputs and logs in (default: not kept)")
    parser.add_argument("--tiny", action="store_true", help="all runs with two small layers of pd in bf16")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.warmup <= arguments.steps - 2:
        parser.error(f"--warmup {arguments.warmup} leaves no two of --steps {arguments.steps}")
    if arguments.torchtitan and not arguments.torchtitan.is_dir():
        parser.error(f"--torchtitan: there is no folder {arguments.torchtitan}")
    arguments.torchtitan = arguments.torchtitan and arguments.torchtitan.resolve()  # processes may change theirs
    if arguments.paddleformers and not os.access(arguments.paddleformers, os.X_OK):
        parser.error(f"--paddleformers: {arguments.paddleformers} is no program")
    arguments.paddleformers = arguments.paddleformers and arguments.paddleformers.absolute()  # a venv's is a link
    arguments.devices = visible_devices("nvgpu", os.environ)
    needed = max((RUNS[name].gpus for name in arguments.runs or ()), default=1)
    if needed > len(arguments.devices):
        parser.error(f"--runs need {needed} GPUs; visible here: {len(arguments.devices)}")
    if arguments.runs is None:
        arguments.runs = [name for name, run in OUR_RUNS.items() if run.gpus <= len(arguments.devices)]
    return arguments


def start(command, log, timeout):
    """Exit status of the Command, whose output goes to the file `log`; None if it had to be ended at its timeout."""
    environment = os.environ | {"PYTHONPATH": python_path()} | command.environment
    with open(log, "w") as output:
        process = subprocess.Popen(command.words, env=environment, stdout=output, stderr=output)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the launchers end all that they have started
            process.wait()
            return None


OUT_OF_MEMORY = re.compile(
    r"out of memory error.*|CUDA out of memory.*|cannot allocate.*|CUDA_ERROR_OUT_OF_MEMORY.*", re.IGNORECASE
)
ERROR = re.compile(r"(?:\w+Error\b|error:|ERROR\]).*", re.IGNORECASE)


def last_error(text):
    """The line that says best why a run failed: memory, else the last error, else its last words."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern in (OUT_OF_MEMORY, ERROR):
        if found := [match[0] for line in lines if (match := pattern.search(line))]:
            return found[-1][:300]
    return lines[-1][:300] if lines else "no output"


def execute(run, conditions):
    """Trains, and returns the run's row: {"status": "ok", …} or {"status": "failed" or "missing", "reason"}."""
    row = {"run": run.described, "seconds": 0.0, "versions": run.packages(conditions)}
    if missing := [name for name, version in row["versions"].items() if version is None]:
        return row | {"status": "missing", "reason": f"not installed here: {', '.join(missing)}; {run.remedy}"}
    conditions.folder.mkdir(parents=True, exist_ok=True)
    command, began = run.command(conditions), time.monotonic()
    status = start(command, conditions.log, conditions.timeout)
    row |= {"seconds": round(time.monotonic() - began, 1), "command": quoted(command.words)}
    if status != 0:
        ending = f"exit status {status}" if status else f"not done after {conditions.timeout:g} s"
        words = last_error(conditions.log.read_text(errors="replace"))
        return row | {"status": "failed", "reason": f"{words} ({ending})"}
    try:
        row |= {"status": "ok"} | measured(run, run.records(conditions), conditions.warmup, row["seconds"])
    except ValueError as error:
        return row | {"status": "failed", "reason": str(error)}
    return row | ({"timeline": run.account(conditions)} if conditions.profiled else {})


def measured(run, records, warmup, seconds):
    """Speeds, memory and losses from a training's records, of those that come after `warmup` steps.

    Raises ValueError where there are none.
    """
    before = [0] + [record["step"] for record in records]
    steady = [record for record, first in zip(records, before, strict=False) if first >= warmup]
    if not steady:
        raise ValueError(f"its log has no steps behind the first {warmup}")
    times = step_times(steady)
    all_steps = sum(
        (record["step"] - first) * record["step_time"] for record, first in zip(records, before, strict=False)
    )
    speeds = run.speeds(times["median"], steady)
    return {
        "step_ms": times,
        **speeds,
        "tokens_per_second_per_gpu": speeds["tokens_per_second"] / run.gpus,
        "peak_bytes": records[-1]["peak_memory_bytes"],
        "loss": [records[0]["loss"], records[-1]["loss"]],
        "start_seconds": round(seconds - all_steps, 1),
    }


def next_try(peaks, refused, capacity=None):
    """The batch to try next, given {batch that fits: its peak in bytes} and the least that does not (or None).

    Doubling, then bisection; from two peaks on, where a line through the last two meets the capacity in bytes.
    """
    most = max(peaks, default=0)
    guess = 2 * most if refused is None else (most + refused) // 2
    if len(peaks) > 1 and capacity:
        (b0, p0), (b1, p1) = sorted(peaks.items())[-2:]
        guess = b1 + int((capacity - p1) * (b1 - b0) / (p1 - p0)) if p1 > p0 else guess
    return max(most + 1, guess if refused is None else min(guess, refused - 1))


def find_largest_batch(train, capacity=None):
    """The greatest batch for which train(batch) gives a row that is ok.

    Returns {"status": "ok", "batch" (0: none), "tried": [batches], "best": its row}, or {"status": "failed", "reason"}
    for a failure that is not of memory.
    """
    tries, refused, peaks = {}, None, {}
    while refused != max(peaks, default=0) + 1:
        batch = next_try(peaks, refused, capacity)
        row = tries[batch] = train(batch)
        if row["status"] == "ok":
            peaks[batch] = row["peak_bytes"]
        elif OUT_OF_MEMORY.search(row["reason"]):
            refused = batch
        else:
            return {"status": "failed", "reason": f"batch {batch}: {row['reason']}"}
    most = max(peaks, default=0)
    return {"status": "ok", "batch": most, "tried": list(tries), "best": tries.get(most)}


class Gpus:
    """Lends devices to runs, which wait until as many as they need are free."""

    def __init__(self, devices):
        self.free, self.changed = list(devices), Condition()

    @contextmanager
    def lend(self, count):
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            lent, self.free = self.free[:count], self.free[count:]
        try:
            yield lent
        finally:
            with self.changed:
                self.free = sorted(self.free + lent, key=int)
                self.changed.notify_all()


def capacity_of(hardware):
    """Bytes of the GPU's memory that tensors may take: a twentieth stays for CUDA, NCCL and gaps. None if unknown."""
    total = re.fullmatch(r"(\d+) MiB", hardware.get("memory.total", ""))
    return int(total[1]) * 2**20 * 0.95 if total else None


def markdown(result):
    """The readable tables of a result."""
    lines = report.heading("Pretraining", result)
    if result["runs"]:
        lines += _runs_table(result["runs"]) + _timelines(result["runs"])
    for name, modes in result["largest_batch"].items():
        lines += [f"## Largest batch: {name}", "", *_batches_table(modes)]
    return "\n".join(lines)


def _runs_table(runs):
    def row(_, found):
        run, ms = found["run"], found["step_ms"]
        size = run["size"]
        peer = [f"{run['framework']} {version}" for version in [*found["versions"].values()][:1]]
        sequences = f"{run['batch']} × {size['dims']['sequence']}"
        sequences = f"{size['micro_batches']} of {sequences}" if size["micro_batches"] > 1 else sequences
        base = runs.get(run["base"], {})
        scaling = found["tokens_per_second_per_gpu"] / base["tokens_per_second_per_gpu"] if "step_ms" in base else None
        return [
            ", ".join(filter(None, [*peer, run["precision"], f"{size['layers']} layers", sequences, run["layout"]])),
            f"{run['gpus']}",
            f"{ms['median']:.1f}",
            f"{ms['min']:.1f} to {ms['max']:.1f}",
            f"{found['tokens_per_second']:.0f}",
            f"{found['tokens_per_second_per_gpu']:.0f}",
            f"{found['samples_per_second']:.2f}",
            f"{found['tflops_per_gpu']:.0f}" if found["tflops_per_gpu"] else "",
            f"{scaling:.3f} of {run['base']}" if scaling else "",
            f"{found['peak_bytes'] / 1e9:.1f}",
            " → ".join(f"{loss:.3f}" for loss in found["loss"]),
            f"{found['start_seconds']:.0f}",
        ]

    header = "run|what|GPUs|ms|range|tokens/s|per GPU|samples/s|TFLOP/s|scaling|peak GB|loss|start s".split("|")
    flags = [f"- {name}: `{row['run']['flags']}`" for name, row in runs.items() if row["run"]["flags"]]
    return report.rows(header, runs, row) + ["Flags besides the launcher's:", "", *flags, ""] * bool(flags)


def _timelines(runs):
    found = {name: row["timeline"] for name, row in runs.items() if "timeline" in row}
    lines = [f"{name}: no timeline, {row['reason']}\n" for name, row in found.items() if row["status"] != "ok"]
    if accounts := {name: row for name, row in found.items() if row["status"] == "ok"}:
        lines += ["## Where the first GPU's time goes, in further steps under the profiler", ""]
        lines += timeline.markdown(accounts)
        for name, row in accounts.items():
            lines += [f"Longest kernels of {name}:", "", *timeline.kernels_table(row)]
    return lines


def _batches_table(modes):
    def row(_, found):
        best, tried = found["best"], ", ".join(map(str, found["tried"]))
        if best is None:
            return ["0", "", "", tried]
        return [found["batch"], f"{best['peak_bytes'] / 1e9:.1f}", f"{best['tokens_per_second_per_gpu']:.0f}", tried]

    header = ["recompute", "batch", "peak GB", "tokens/s of two steps", "tried"]
    return report.rows(header, modes, lambda name, found: list(map(str, row(name, found))))


class Measuring:
    """The runs that a command line asks for, each on GPUs of its own; every row is written as it comes."""

    def __init__(self, arguments, result, path, folder):
        self.arguments, self.result, self.path, self.folder = arguments, result, path, folder
        self.gpus, self.writing = Gpus(arguments.devices), Lock()

    def measure(self, name):
        with self.gpus.lend(RUNS[name].gpus) as devices:
            row = self.train(name, RUNS[name], devices)
            self.keep(self.result["runs"], name, row)

    def search(self, mode):
        """Find the largest batch of a run with a mode of recompute."""
        wanted = self.arguments.largest_batch

        def fits(batch):
            run, label = replace(RUNS[wanted], recompute=mode, batch=batch), f"{wanted}-{mode}-b{batch}"
            row = self.train(label, run, devices, steps=TRY_STEPS, warmup=1, profiled=0)
            return self.keep(self.result["tries"], label, row)

        with self.gpus.lend(1) as devices:
            row = find_largest_batch(fits, capacity_of(self.result["hardware"]))
        self.keep(self.result["largest_batch"].setdefault(wanted, {}), mode, row)

    def train(self, name, run, devices, **options):
        arguments = self.arguments
        wanted = dict(steps=arguments.steps, warmup=arguments.warmup, profiled=arguments.profile) | options
        conditions = Conditions(
            Path(self.folder, name),
            devices,
            timeout=arguments.timeout,
            torchtitan=arguments.torchtitan,
            paddleformers=arguments.paddleformers,
            **wanted,
        )
        row = execute(run.tiny if arguments.tiny else run, conditions)
        found = f"{row['step_ms']['median']:.1f} ms" if row["status"] == "ok" else row["reason"]
        print(f"{name:32} {row['seconds']:6.1f} s  {found}", flush=True)
        return row

    def keep(self, rows, name, row):
        with self.writing:
            rows[name] = row
            report.write(self.result, self.path, markdown(self.result))
        return row


def main(argv=None):
    arguments = parse_arguments(argv)
    named = {arguments.largest_batch, *arguments.runs}
    definitions = DEFINITIONS + [finetuning.DEFINITION] * bool(named & FINETUNING_RUNS.keys())
    definitions += [FORMERS_DEFINITION] * bool(named & FORMERS_RUNS.keys())
    definitions += [TITAN_DEFINITION] * bool(named & TITAN_RUNS.keys())
    result = report.header("throughput", argv, definitions) | {
        "versions": packages(),
        "settings": {"steps": arguments.steps, "warmup": arguments.warmup, "at_once": arguments.at_once},
        "libraries": {},  # of the runs' own processes; paddle_te.env tells
        "runs": {},
        "tries": {},  # for the largest batch
        "largest_batch": {},
    }
    result["hardware"]["gpus"] = max([RUNS[name].gpus for name in arguments.runs], default=1)
    path = report.destination(result, arguments, "runs" if arguments.runs else "largest-batch")

    kept = nullcontext(arguments.logs) if arguments.logs else tempfile.TemporaryDirectory()
    with kept as folder, ThreadPoolExecutor(len(arguments.devices) if arguments.at_once else 1) as pool:
        measuring = Measuring(arguments, result, path, folder)
        list(pool.map(measuring.measure, arguments.runs))  # raises what one has raised
        modes = RUNS[arguments.largest_batch].recomputes if arguments.largest_batch else ()
        list(pool.map(measuring.search, modes))
    print(markdown(result))
    print(f"{path} and {path.with_suffix('.md')}")
    rows = [*result["runs"].values(), *result["largest_batch"].get(arguments.largest_batch, {}).values()]
    return 0 if any(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
