"""Prints the peak of Paddle's allocator in the second step of small models, a line for each of CASES: its name and the
bytes, less what was allocated before. `python step_memory.py nvgpu:0`, on nvgpu's host runtime with TE's kernels
emulated."""

import gc
import sys

import paddle
from paddle.base import core

from paddle_te import fp8
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.freezing import freeze
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, lora_config
from paddle_te.hosts.paddlenlp.modeling import causal_mask_only
from paddle_te.native import rmsnorm
from paddle_te.ops.te import packing
from paddle_te.optimizer import fuse_clipping
from paddle_te.optimizer.compact_states import keep_compact
from paddle_te.options.lora import Adapter
from tests import emulated_te, small_models

SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
FEW_WORDS, COMPACT = dict(vocab_size=64), dict(optim_moments="bfloat16", master_weights="bf16_remainder")
STORED = dict(activation_func_fp8_input_store=True, recompute_modules=["layernorm", "mlp_act"])
LESS_KEPT = dict(fp8_input_store=True, recompute_modules=("layernorm", "mlp_act"))
# name: (what of the configuration, what of the planner's Layout), for each moment in which a step may need most
CASES = {
    "loss": ({}, dict(precision="bf16") | COMPACT),
    "lm_head in fp8": (dict(fp8_lm_head=True), dict(fp8_head=True)),
    "loss in chunks": (dict(use_fused_linear_cross_entropy=True, vocab_size=4096), dict(batch=2, precision="bf16")),
    "last layer": (FEW_WORDS, dict()),
    "norms of q and k": (FEW_WORDS | dict(family="qwen3", head_dim=64), dict()),
    "norms behind the halves": (
        FEW_WORDS | dict(family="olmo2", recompute_modules=["layernorm"]),
        dict(recompute_modules=("layernorm",)),
    ),
    "norms before and behind them": (FEW_WORDS | dict(family="glm4", head_dim=64), dict()),
    "optimizer, frozen": (
        {},
        dict(precision="bf16", recompute="full", batch=1, sequence=16, freeze=(r"embed|layers\.[01]\.",)),
    ),
    "last layer, the second micro-batch": (FEW_WORDS, dict(micro_batches=2)),
    "first layer": (FEW_WORDS, dict(recompute="full")),
    "optimizer": ({}, dict(precision="bf16", recompute="full", batch=1, sequence=16)),
    "LoRA": (FEW_WORDS, dict(lora=dict(rank=8))),
    "LoRA, base in fp8": ({}, dict(lora=dict(rank=8, fp8_base=True))),
    "LoRA, base in fp8, transposes kept": ({}, dict(lora=dict(rank=8, fp8_base=True), keep_fp8_transpose_cache=True)),
    "LoRA, base in fp8, less kept": (FEW_WORDS | STORED, dict(lora=dict(rank=8, fp8_base=True)) | LESS_KEPT),
    "less kept": (FEW_WORDS | STORED, LESS_KEPT),
    "LoRA, base in fp8, recomputed": (FEW_WORDS, dict(lora=dict(rank=8, fp8_base=True), recompute="full")),
}


def layout_of(case):
    """Fields of the planner's Layout that a case has."""
    return dict(gpus=1, sequence=128, batch=4) | CASES[case][1]


def config_of(case):
    """The case's configuration."""
    settings, layout = CASES[case][0], layout_of(case)
    config = small_models.config(small_models.TE, **SIZES | dict(vocab_size=512, dtype="bfloat16") | settings)
    config.seq_length = config.max_position_embeddings = layout["sequence"]
    config.use_fp8 = layout.get("precision", "fp8") == "fp8"
    config.recompute_granularity = "full"
    return config


def peak(case):
    """Bytes."""
    gc.collect()
    before = core.device_memory_stat_current_value("Allocated", 0)
    config, layout = config_of(case), layout_of(case)
    lora = layout.get("lora", {})
    with fp8.fp8_model_init(lora.get("fp8_base", False), None, layout.get("keep_fp8_transpose_cache", False)):
        model = model_class(config).from_config(config, dtype="bfloat16")
    if "recompute" in layout:
        model.recompute_enable()
    freeze(model, layout.get("freeze"))
    if lora:
        model = TELoRAModel(model, lora_config(Adapter(rank=lora["rank"]), "bfloat16"))
    model.train()
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    rate = paddle.optimizer.lr.LinearWarmup(1e-3, 3, 0.0, 1e-3)
    trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    optimizer = paddle.optimizer.AdamW(rate, parameters=trained, multi_precision=True, grad_clip=clip)
    fuse_clipping(optimizer)
    if "optim_moments" in layout:
        keep_compact(optimizer, layout["optim_moments"], layout["master_weights"], seed=0)
    ids = paddle.randint(0, config.vocab_size, [layout["batch"], config.seq_length])
    several = layout.get("micro_batches", 1)
    for _ in range(2):
        core.device_memory_stat_reset_peak_value("Allocated", 0)
        for number in range(several):
            with causal_mask_only(), fp8.microbatch(is_first=number == 0 if several > 1 else None):
                loss = model(input_ids=ids, labels=ids)[0]
            loss.backward()
            del loss
        optimizer.step()
        optimizer.clear_grad()
    return core.device_memory_stat_peak_value("Allocated", 0) - before


if __name__ == "__main__":
    paddle.set_device(sys.argv[1])
    emulated_te.install()
    rmsnorm.WARPS[SIZES["hidden_size"]] = 1  # our kernels norm it, as they do real sizes
    packing.JOINED = 0  # each tensor is let go of when it is not needed any more, as it is for large sizes
    for name in CASES:
        print(f"{name}: {peak(name)}", flush=True)
