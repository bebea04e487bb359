"""Training jobs of tests/multiprocess/distributed and tests/gpu: layouts, variants, start, results.

Every layout trains from the same weights on the same 12 sequences a step. One launch serves a whole layout: its
variants (backend, precision, recompute, resume) run one after another in the same processes (train.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paddle_te.options import BACKENDS
from paddle_te.runs.fp8_log import FP8_LOG, FP8Log
from tests.nvgpu_processes import python_path
from tests.processes import end

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "model"
SEED = 1234  # of initial weights
TP, PP, SHARDING = "tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree"
SEP, CP = "sep_parallel_degree", "context_parallel_degree"
# name: processes, flags. per_device_train_batch_size · gradient_accumulation_steps · data ranks = 12
LAYOUTS = {
    "tp2": (2, {TP: 2}),
    "sp_tp2": (2, {TP: 2, "sequence_parallel": "true"}),
    "pp2": (2, {PP: 2}),
    "pp3_vp2": (3, {PP: 3, "virtual_pp_degree": 2}),
    "sharding1": (2, {SHARDING: 2, "sharding": "stage1"}),
    "sharding2": (2, {SHARDING: 2, "sharding": "stage2"}),
    "sharding3": (2, {SHARDING: 2, "sharding": "stage3"}),
    "dp2": (2, {}),
    "sep2": (2, {SEP: 2}),
    "cp2": (2, {CP: 2, "transformer_engine_backend": "paddle"}),  # none has no ring attention on nvgpu
    "tp2_pp2": (4, {TP: 2, PP: 2}),
    "tp2_sharding2": (4, {TP: 2, SHARDING: 2, "sharding": "stage1"}),
    "sharding4": (
        4,
        {
            SHARDING: 4,
            "sharding": "stage2",
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 1,
        },
    ),
}
BF16 = dict(bf16=True, fp16_opt_level="O2", amp_master_grad=True)
PARTS = {  # of a variant's name, after its backend, joined by "_"
    "bf16": BF16,
    "fp8": BF16 | dict(use_fp8=True, fp8_statistics=1),
    "dpa": dict(fp8_dpa=True, fp8_skip_layers="last:1"),
    # all decoder layers leave fp8 when the checkpoint is saved
    "head": dict(fp8_lm_head=True, fp8_statistics=2, fp8_fallback="bf16:relative_error=0.01"),
    "core": dict(recompute=True, recompute_granularity="core_attn"),
    "parts": dict(recompute=True, recompute_granularity="core_attn", recompute_modules=["layernorm", "mlp"]),
    "stored": dict(activation_func_fp8_input_store=True, recompute_modules=["layernorm", "mlp_act"]),
    "full": dict(recompute=True, recompute_granularity="full"),
    "fused": dict(use_fused_linear_cross_entropy=True),
    "unclipped": dict(max_grad_norm=0),
    "half": BF16 | dict(amp_master_grad=False),
    "compact": dict(optim_moments="bfloat16", master_weights="bf16_remainder"),
    "blocks": dict(optim_moments="int8", master_weights="bf16_remainder"),
    "offload": dict(offload_optimizer=0.9),
    "muon": dict(optim="muon"),
    # where micro-batches have different numbers of labels that count
    "packed": dict(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True),
    "uneven": dict(eod_mask_loss=True, uneven=True),  # very different ones
    "whole": dict(per_device_train_batch_size=12, gradient_accumulation_steps=1),
    "early": dict(optimizer_in_backward="unclipped"),
    "late": dict(optimizer_in_backward="last_norm", max_grad_norm=0.05),
    "tight": dict(max_grad_norm=0.05),  # which all gradients exceed
    "smooth": dict(label_smoothing_factor=0.2),
    "ring": {SEP: 1, CP: 2},  # in the processes of a layout with SEP 2: Fleet has the same group of ranks for both
    "frozen": dict(freeze=[r"embed_tokens|layers\.0\.", "norm"]),
}
STEPS, SAVED_STEP = 4, 2


class Run(NamedTuple):
    """A finished variant: loss of each step, final weights (whole), each rank's sizes (train.py), fp8 statistics."""

    losses: dict
    weights: dict
    sizes: list
    statistics: FP8Log


def variant(name, init):
    """train.py's flags of a variant, such as te_fp8_full; init: `make_initial_weights`'.

    A later part goes before an earlier one. Raises ValueError for a backend or a part that does not exist.
    """
    backend, *parts = name.split("_")
    if unknown := sorted({backend} - BACKENDS.keys() | set(parts) - PARTS.keys()):
        known = f"a name is one of {', '.join(BACKENDS)}, and then any of {', '.join(PARTS)}"
        raise ValueError(f"variant {name!r}: unknown {', '.join(unknown)}; {known}")
    flags = dict(name=name, init=init, transformer_engine_backend=BACKENDS[backend])
    for part in parts:
        flags |= PARTS[part]
    return flags


def variants(names, init, folder, resumed=()):
    """Those in `resumed` save a checkpoint in the middle, from which a further variant, NAME_resumed, goes on."""
    made = [variant(name, init) for name in names]
    for flags in made[:]:
        if flags["name"] in resumed:
            flags |= dict(save_strategy="steps", save_steps=SAVED_STEP)
            checkpoint = folder / flags["name"] / f"checkpoint-{SAVED_STEP}"
            made.append(variant(flags["name"], init) | dict(name=f"{flags['name']}_resumed", resume=str(checkpoint)))
    return made


def launch(folder, processes, flags, variants, device, environment, timeout=500):
    """Trains all variants in `processes` processes on the first devices that `environment` shows, and returns `read`'s.

    Raises RuntimeError, with the ranks' last lines, if the job fails or runs longer than `timeout` seconds; then with
    their stacks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data_ranks = processes // (flags.get(TP, 1) * flags.get(PP, 1) * flags.get(SEP, 1) * flags.get(CP, 1))
    batch = dict(per_device_train_batch_size=4 // data_ranks, gradient_accumulation_steps=3)
    job = dict(layout=batch | flags | dict(device=device), variants=variants, output=str(folder))
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable]
    if processes > 1:
        devices = ",".join(map(str, range(processes)))
        command += ["-m", "paddle.distributed.launch", "--devices", devices, "--log_dir", folder / "logs"]
    command += [HERE / "train.py", folder / "job.json"]
    own = dict(PYTHONPATH=python_path(), OMP_NUM_THREADS="1", DEFERRED_IMPORTS="1")
    environment = os.environ | environment | own
    with open(folder / "output.log", "w") as output:
        status = end(subprocess.Popen(command, env=environment, stdout=output, stderr=output), timeout)
    if status != 0:
        status = f"none after {timeout} s" if status is None else status
        logs = [folder / "output.log", *sorted((folder / "logs").glob("workerlog.*"))]
        tails = "".join(f"\n{log.name}:\n{log.read_text(errors='replace')[-6000:]}" for log in logs)
        raise RuntimeError(f"exit status {status}{tails}")
    return read(folder, [flags["name"] for flags in variants], processes)


def references(folder, layouts, initial_weights, environment):
    """Train each reference of `layouts` in one process: {variant: Run}. A layout is what `check_layout` takes."""
    names = {reference for _, _, variants, _ in layouts.values() for reference, _ in variants.values()}
    made = variants(sorted(names), initial_weights, folder)
    return launch(folder, 1, {}, made, "nvgpu", environment | dict(EMULATED_TE="1"))


def check_layout(layout, folder, initial_weights, whole, environment):
    """Trains in a layout: (processes, flags, {variant: (reference, tolerances)}, variants to resume).

    whole: `references`.
    """
    processes, flags, expected, resumed = layout
    made = variants([*expected], initial_weights, folder, resumed)
    runs = launch(folder, processes, flags, made, "nvgpu", environment | dict(EMULATED_TE="1"))
    for name, (reference, tolerances) in expected.items():
        check_same(runs[name], whole[reference], *tolerances)
    for name in resumed:
        check_resumed(runs, name)


def read(folder, names, processes):
    """{variant: Run} of those that have finished."""
    runs = {}
    for name in names:
        if not (folder / f"{name}.json").exists():
            continue
        losses = {int(step): loss for step, loss in json.loads((folder / f"{name}.json").read_text()).items()}
        sizes = [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(processes)]
        log = folder / name / FP8_LOG
        statistics = FP8Log.read(log) if log.exists() else FP8Log()
        runs[name] = Run(losses, dict(np.load(folder / f"{name}.npz")), sizes, statistics)
    return runs


def write_config(folder, changes):
    """Writes folder/model's configuration, in which None leaves a key out, and draws a seed for its weights."""
    import paddle

    paddle.seed(SEED)
    (folder / "model").mkdir(parents=True)
    config = json.loads((MODEL / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "model/config.json").write_text(json.dumps(config))


def save_random_model(folder, **changes):
    """PaddleNLP's weights at random, biases too, in folder/native; changes: of folder/model's configuration."""
    import paddle
    from paddlenlp.transformers import AutoConfig, AutoModelForCausalLM

    write_config(folder, changes)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder / "model")))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # PaddleNLP makes them zeros
            parameter.set_value(0.1 * paddle.randn(parameter.shape))
    model.save_pretrained(str(folder / "native"))


def make_initial_weights(folder, layers=6, **changes):
    """The same random weights in both layouts: {value of the switch: folder, "model": folder of the configuration}."""
    from paddle_te.weights import convert

    save_random_model(folder, num_hidden_layers=layers, **changes)
    convert(folder / "native", folder / "te", "pd2te", progress=False)
    te = str(folder / "te")
    return {"none": str(folder / "native"), "paddle": te, "transformer_engine": te, "model": str(folder / "model")}


def make_own_weights(folder, **changes):
    """As `make_initial_weights`, of a model that has a class of ours only."""
    import paddle

    from paddle_te.hosts.paddlenlp.families import model_class
    from paddle_te.hosts.paddlenlp.loading import read_config

    write_config(folder, changes)
    config = read_config(folder / "model")
    config.transformer_engine_backend = "paddle"
    model = model_class(config)(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms, which are ones
            parameter.set_value(1 + 0.1 * paddle.randn(parameter.shape))
    model.save_pretrained(str(folder / "te"))
    te = str(folder / "te")
    return {"paddle": te, "transformer_engine": te, "model": str(folder / "model")}


def loss_difference(got, want):
    """Greatest |loss - reference| / reference of the steps; both must have the same."""
    assert got.losses.keys() == want.losses.keys()
    return float(np.max([abs(got.losses[step] - loss) / loss for step, loss in want.losses.items()]))  # NaN stays


def weight_difference(got, want):
    """Greatest relative L2 difference of a weight."""
    assert got.weights.keys() == want.weights.keys()
    norm = np.linalg.norm  # experts' bias is zeros at first
    weights = want.weights.items()
    return float(np.max([norm(got.weights[name] - weight) / (norm(weight) or 1.0) for name, weight in weights]))


def check_same(got, want, loss_tolerance, weight_tolerance):
    """Losses and final weights within relative tolerances; NaN is beyond any."""
    assert loss_difference(got, want) <= loss_tolerance, (got.losses, want.losses)
    assert weight_difference(got, want) <= weight_tolerance


def check_resumed(runs, name):
    """The losses after the checkpoint are the uninterrupted run's to the last bit."""
    assert runs[f"{name}_resumed"].losses == later(runs[name]).losses


def later(run):
    """A Run with the losses after the checkpoint only."""
    losses = {step: loss for step, loss in run.losses.items() if step > SAVED_STEP}
    assert STEPS in losses
    return run._replace(losses=losses)


def logged_every(run, steps):
    """A Run whose losses are means over so many steps."""
    ends = [step for step in run.losses if step % steps == 0]
    means = {end: float(np.mean([run.losses[step] for step in range(end - steps + 1, end + 1)])) for end in ends}
    return run._replace(losses=means)


def check_sizes(flags, ranks, whole):
    """What is said to be sharded is; ranks: each one's sizes, whole: those of one process."""
    total = whole["parameters"]
    for rank in ranks:
        if TP in flags or PP in flags:
            assert rank["parameters"] < 0.75 * total
        else:
            assert rank["parameters"] == total or "stage3" in flags.get("sharding", "")
        if "stage3" in flags.get("sharding", ""):
            assert rank["sliced_parameters"] > 0 and rank["slices"] < 0.6 * total
        if "sharding" in flags:
            assert rank["moments"] < 0.6 * rank["parameters"] or "stage3" in flags["sharding"]
    if PP in flags and TP not in flags:
        assert sum(rank["parameters"] for rank in ranks) == total
