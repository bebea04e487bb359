"""TP, SP, PP, virtual PP, sharding and DP in several processes on nvgpu's host runtime, against one process on the CPU.

Every layout trains from the same weights on the same 12 sequences a step. One launch serves a whole layout: its
variants (backend, recompute, bf16, resume) run one after another in the same processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TP, PP, SHARDING = "tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree"
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
    "tp2_pp2": (4, {TP: 2, PP: 2}),
    "tp2_sharding2": (4, {TP: 2, SHARDING: 2, "sharding": "stage1"}),
}
FLOAT32 = ["none", "none_full", "pd", "pd_core_attn", "pd_full"]
BF16 = ["none_bf16", "pd_bf16"]


def variant(name, init, **flags):
    backend, _, rest = name.partition("_")
    flags["transformer_engine_backend"] = {"none": "none", "pd": "paddle"}[backend]
    if rest in ("full", "core_attn"):
        flags |= dict(recompute=True, recompute_granularity=rest)
    if rest == "bf16":
        # float32 main gradients: Paddle's hybrid clipping has no bf16 factor on custom devices
        flags |= dict(bf16=True, fp16_opt_level="O2", amp_master_grad=True)
    return dict(name=name, init=init, **flags)


def launch(folder, processes, layout, variants, device, environment):
    """Trains; returns {variant: (losses, weights, sizes of each rank)}."""
    folder.mkdir(parents=True, exist_ok=True)
    data_ranks = processes // (layout.get(TP, 1) * layout.get(PP, 1))
    batch = dict(per_device_train_batch_size=2, gradient_accumulation_steps=6 // data_ranks)
    job = dict(layout=batch | layout | dict(device=device), variants=variants, output=str(folder))
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, HERE / "train.py", folder / "job.json"]
    if processes > 1:
        devices = ",".join(map(str, range(processes)))
        launcher = ["-m", "paddle.distributed.launch", "--devices", devices, "--log_dir", folder / "logs"]
        command = [sys.executable, *launcher, *command[1:]]
    environment = os.environ | environment | dict(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    if result.returncode:
        logs = "".join(log.read_text()[-3000:] for log in sorted((folder / "logs").glob("workerlog.*")))
        pytest.fail(f"exit status {result.returncode}\n{result.stdout[-2000:]}{result.stderr[-2000:]}\n{logs}")
    return {v["name"]: read(folder, v["name"], processes) for v in variants}


def read(folder, name, processes):
    losses = {int(step): loss for step, loss in json.loads((folder / f"{name}.json").read_text()).items()}
    sizes = [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(processes)]
    return losses, dict(np.load(folder / f"{name}.npz")), sizes


@pytest.fixture(scope="module")
def initial_weights(tmp_path_factory):
    """{backend: folder} with the same random weights in both layouts."""
    import paddle
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

    from paddle_te.checkpoint import convert

    folder = tmp_path_factory.mktemp("weights")
    seed = int.from_bytes(os.urandom(3), "little")
    print(f"initial weights: paddle.seed({seed})")
    paddle.seed(seed)
    LlamaForCausalLM(LlamaConfig.from_pretrained(str(HERE / "model"))).save_pretrained(str(folder / "native"))
    convert(folder / "native", folder / "te", "pd2te")
    return {"none": str(folder / "native"), "paddle": str(folder / "te")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, initial_weights, nvgpu_host):
    """One process: float32 on the plain CPU, bf16 (which that cannot) on nvgpu."""
    folder = tmp_path_factory.mktemp("reference")
    variants = [variant(name, initial_weights) for name in ("none", "pd")]
    result = launch(folder / "float32", 1, {}, variants, "cpu", {})
    variants = [variant(name, initial_weights) for name in BF16]
    variants = [variant(name, initial_weights) for name in BF16]
    return result | launch(folder / "bf16", 1, {}, variants, "nvgpu", nvgpu_host)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def check_same(got, want, loss_tolerance, weight_tolerance):
    assert got[0].keys() == want[0].keys()
    for step, loss in want[0].items():
        assert abs(got[0][step] - loss) <= loss_tolerance * loss, (step, got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, weight in want[1].items():
        assert relative(got[1][name], weight) <= weight_tolerance, name


def test_one_process_none_and_pd_agree(reference):
    losses, weights, _ = reference["none"]
    assert losses[6] < losses[1] - 1e-2
    for step, loss in losses.items():
        assert abs(reference["pd"][0][step] - loss) < 1e-5 * loss


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, tmp_path, reference, initial_weights, nvgpu_host):
    processes, flags = LAYOUTS[layout]
    # bf16 under PP was seen on two H200s only
    bf16 = [] if PP in flags else BF16
    variants = [variant(name, initial_weights) for name in FLOAT32 + bf16]
    saving = dict(save_strategy="steps", save_steps=3)
    for backend in ("none", "pd"):
        saved = variant(backend, initial_weights, **saving) | dict(name=f"{backend}_saved")
        resumed = variant(backend, initial_weights) | dict(name=f"{backend}_resumed")
        resumed["resume"] = str(tmp_path / f"{backend}_saved" / "checkpoint-3")
        variants += [saved, resumed]
    result = launch(tmp_path, processes, flags, variants, "nvgpu", nvgpu_host)

    for name in FLOAT32:
        check_same(result[name], reference[name.partition("_")[0]], 1e-5, 1e-5)
    for name in bf16:
        check_same(result[name], reference[name], 5e-3, 2e-2)
    for backend in ("none", "pd"):
        whole, resumed = result[f"{backend}_saved"][0], result[f"{backend}_resumed"][0]
        assert resumed == {step: whole[step] for step in (4, 5, 6)}
    check_sizes(layout, flags, result["pd"][2], reference["pd"][2][0])


def check_sizes(layout, flags, ranks, whole):
    """What is said to be sharded is."""
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
