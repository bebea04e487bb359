"""TP, SP, PP, virtual PP, sharding and DP in several processes on nvgpu's host runtime, against one process on the CPU.

te's kernels are emulated (tests/emulated_te.py); tests/gpu/test_parallel.py has the same for te on GPUs.
"""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.distributed import jobs
from tests.nvgpu_processes import python_path
from tests.processes import run

SCRIPT = Path(__file__).parents[3] / "llm/llama/run_pretrain.py"

TIGHT = "pd_tight"  # clipped in AdamW by a norm that all ranks have a part of; the reference by Paddle itself
HALF = "pd_half"  # bf16 gradients, which Paddle alone cannot clip on nvgpu
FP8 = "te_fp8"
# PaddleNLP's own layers, where ranks divide activations, stages or weights; in bf16 what COMPACT is compared with
NONE_IN, NONE_BF16 = ("sp_tp2", "pp3_vp2", "sharding3", "tp2_pp2", "tp2_sharding2"), "none_bf16"
# where ranks sum outputs or gather tokens, hold several micro-batches, or gather weights for each forward
FULL, FULL_IN = ("pd_full", "te_fp8_full"), ("tp2", "sp_tp2", "pp3_vp2", "sharding3")
PARTS, PARTS_IN = ("pd_parts", "te_fp8_parts"), ("sp_tp2", "pp3_vp2", "sharding3")
# attention in fp8, whose layers have no weights: in places of its own where ranks share scales, named in a pipeline
ATTENTION, ATTENTION_IN = ["te_fp8_dpa", "te_fp8_dpa_core"], ("tp2", "pp2")
# the head in fp8: of gathered tokens and a part of the vocabulary, on a stage of its own
HEAD, HEAD_IN = "te_fp8_head", ("sp_tp2", "pp2")
# the head's and the loss's places: after a gather, in a pipeline's loss function, without weights between calls
FUSED, FUSED_IN = {"pd_fused_tight": TIGHT, "te_bf16_fused": "te_bf16"}, ("sp_tp2", "pp3_vp2", "sharding3")
# documents packed into sequences: in flat tokens, in a pipeline's tuples, without weights between calls; {variant:
# (reference, tolerances)}
PACKED_IN = "sp_tp2", "pp3_vp2", "sharding3"
PACKED = {
    "none_packed": ("none_packed", 1e-5, 1e-5),
    "pd_packed_full": ("pd_packed", 1e-5, 1e-5),
    "te_fp8_packed_full": ("te_fp8_packed", 4e-3, 1e-1),
}
# the optimizer's state in 6 bytes a parameter instead of 12, of which ranks have weights of their own or slices; and in
# somewhat more than 4, as each row of these narrow weights has a unit of its own
COMPACT, COMPACT_IN = ("none_bf16_compact", "none_bf16_blocks"), ("sharding2", "sharding3", "tp2_pp2")
# the update in backward: the bits of the ordinary one; clipped by a norm that all ranks have a part of
ORDINARY, EARLY, LATE = "te_fp8_half_unclipped_whole", "te_fp8_half_unclipped_whole_early", "pd_whole_late"
EARLY_IN = ("sp_tp2",)
# the optimizer's states in host memory: the bits of those on the device, of whole weights, slices and stages
OFFLOADED, OFFLOADED_IN = "te_fp8_offload", ("sharding2", "sharding3", "tp2_pp2")
# SwiGLU's input in fp8 for backward, of several micro-batches that wait
STORED, STORED_IN = "te_fp8_stored", ("pp2",)
# momenta only of the matrices, of which a rank has whole ones
MUON, MUON_IN = "pd_muon", ("sharding2",)
# labels that are smoothed over the vocabulary's parts, and weights that are not trained and have no state; in te beside
# others whose gradients are added to main gradients
SMOOTH_FROZEN, TE_FROZEN = "pd_smooth_frozen_unclipped", "te_bf16_frozen"
FROZEN_IN = "tp2", "pp2", "sharding1", "sharding2"
# What each kind of parallelism divides, which its simpler layouts leave to these: tp2 and pp2 to sp_tp2 and pp3_vp2.
HALF_IN = "sp_tp2", "pp3_vp2", "sharding1", "sharding2", "sharding3", "dp2"
# Where two kinds of parallelism meet, what each does alone is proven already: these are for what they share, which are
# the norm that clips, scales, recompute's groups and checkpoints.
MIXED, MIXED_IN = [TIGHT, "pd_full", FP8], ("tp2_pp2", "tp2_sharding2")
RESUMED = [TIGHT, *COMPACT, FP8, ATTENTION[0], HEAD, OFFLOADED, TE_FROZEN, MUON]


@pytest.fixture(scope="module")
def initial_weights(tmp_path_factory):
    """{layers: those of a model}: of two layers, and of six where a pipeline takes it apart."""
    return {layers: jobs.make_initial_weights(tmp_path_factory.mktemp("weights"), layers) for layers in (2, 6)}


@pytest.fixture(scope="module")
def references(tmp_path_factory, initial_weights, warm_start, warm_host):
    """{layers: {variant: Run}} of one process: float32 on the plain CPU, bf16 (which that cannot) on nvgpu."""
    folder = tmp_path_factory.mktemp("reference")
    runs = {layers: {} for layers in initial_weights}
    emulated = warm_host | dict(EMULATED_TE="1")
    on_cpu, on_nvgpu = (
        ["none", "pd", TIGHT, LATE, "none_packed", "pd_packed", SMOOTH_FROZEN, MUON],
        [NONE_BF16, "pd_bf16", HALF, "te_bf16", TE_FROZEN, FP8, ATTENTION[0], HEAD, "te_fp8_packed"],
    )
    for device, names, environment in (("cpu", on_cpu, warm_start), ("nvgpu", on_nvgpu, emulated)):
        variants = []
        for layers, init in initial_weights.items():
            made = jobs.variants(names, init, folder)
            variants += [flags | dict(name=f"{flags['name']} of {layers}") for flags in made]
        found = jobs.launch(folder / device, 1, {}, variants, device, environment)
        for layers in runs:
            runs[layers] |= {name: found[f"{name} of {layers}"] for name in names}
    return runs


def layers_of(flags):
    """A pipeline's stages have several layers each; elsewhere the second says what further ones would."""
    return 6 if jobs.PP in flags else 2


@pytest.mark.parametrize("layers", [2, 6])
def test_one_process_none_and_pd_agree(references, layers):
    none, pd = (references[layers][name] for name in ("none", "pd"))
    assert none.losses[jobs.STEPS] < none.losses[1] - 1e-2
    assert jobs.loss_difference(pd, none) < 1e-5
    assert jobs.loss_difference(references[layers]["pd_packed"], references[layers]["none_packed"]) < 1e-5
    assert references[layers][HALF].losses != references[layers]["pd_bf16"].losses


IN = {  # variants that only some layouts have
    ("none",): NONE_IN,
    (NONE_BF16,): COMPACT_IN,
    (HALF,): HALF_IN,
    FULL: FULL_IN,
    PARTS: PARTS_IN,
    tuple(FUSED): FUSED_IN,
    tuple(ATTENTION): ATTENTION_IN,
    (HEAD,): HEAD_IN,
    COMPACT: COMPACT_IN,
    tuple(PACKED): PACKED_IN,
    (ORDINARY, EARLY, LATE): EARLY_IN,
    (OFFLOADED,): OFFLOADED_IN,
    (STORED,): STORED_IN,
    (MUON,): MUON_IN,
    (SMOOTH_FROZEN, TE_FROZEN): FROZEN_IN,
}


def names_in(layout):
    """The variants that a layout has."""
    names = MIXED if layout in MIXED_IN else [TIGHT, "te_bf16", FP8]
    return [*names, *(name for group, places in IN.items() if layout in places for name in group)]


@pytest.mark.parametrize("layout", [name for name in jobs.LAYOUTS if name not in ("sharding4", "sep2", "cp2")])
def test_layout(layout, tmp_path, references, initial_weights, warm_host):
    processes, flags = jobs.LAYOUTS[layout]
    layers, names = layers_of(flags), names_in(layout)
    variants = jobs.variants(names, initial_weights[layers], tmp_path, RESUMED)
    runs = jobs.launch(tmp_path, processes, flags, variants, "nvgpu", warm_host | dict(EMULATED_TE="1"))
    check_wide(runs, references[layers])
    check_fp8(runs, references[layers])
    check_states(runs, references[layers])
    for name in in_both(RESUMED, names):
        jobs.check_resumed(runs, name)
    jobs.check_sizes(flags, runs[TIGHT].sizes, references[layers]["pd"].sizes[0])


def in_both(names, runs):
    """Those of `names` that a layout has trained."""
    return [name for name in names if name in runs]


def check_wide(runs, reference):
    """float32 and bf16, and what they are combined with."""
    for name in in_both(["none", TIGHT, FULL[0], PARTS[0]], runs):
        jobs.check_same(runs[name], reference[name if name == TIGHT else name.partition("_")[0]], 1e-5, 1e-5)
    assert jobs.loss_difference(runs[TIGHT], reference["pd"]) > 1e-3  # it was clipped
    assert all(rank["clips_in_adamw"] for rank in runs[TIGHT].sizes)
    for name, like in ((NONE_BF16, NONE_BF16), ("te_bf16", "te_bf16"), (HALF, "pd_bf16")):
        if name in runs:
            jobs.check_same(runs[name], reference[like], 5e-3, 2e-2)
    for name in in_both(FUSED, runs):
        plain = FUSED[name]
        jobs.check_same(runs[name], reference[plain], *((1e-5, 1e-5) if plain == TIGHT else (5e-3, 2e-2)))
        assert (runs[name].weights["lm_head.weight"] != runs[plain].weights["lm_head.weight"]).any()  # it was fused
    for name in in_both(PACKED, runs):
        packed_reference, *tolerances = PACKED[name]
        jobs.check_same(runs[name], reference[packed_reference], *tolerances)
    if MUON in runs:
        jobs.check_same(runs[MUON], reference[MUON], 1e-5, 1e-5)
    for name, *tolerances in ((SMOOTH_FROZEN, 1e-5, 1e-5), (TE_FROZEN, 5e-3, 2e-2)):
        if name in runs:
            jobs.check_same(runs[name], reference[name], *tolerances)
            check_frozen(runs[name], runs[TIGHT])


def check_fp8(runs, reference):
    jobs.check_same(runs[FP8], reference[FP8], 4e-3, 1e-1)
    for name in in_both([FP8, ATTENTION[0], HEAD], runs):
        check_statistics(runs[name].statistics, reference[name].statistics)
    assert "te_bf16" not in runs or runs[FP8].losses != runs["te_bf16"].losses
    for name in in_both([FULL[1], PARTS[1]], runs):
        assert runs[name].losses == runs[FP8].losses
    for name in in_both(ATTENTION, runs):
        jobs.check_same(runs[name], reference[ATTENTION[0]], 4e-3, 1e-1)
        assert runs[name].losses == runs[ATTENTION[0]].losses != runs[FP8].losses
    if HEAD in runs:
        jobs.check_same(runs[HEAD], reference[HEAD], 4e-3, 1e-1)
        assert runs[HEAD].losses != runs[FP8].losses
    if STORED in runs:  # forward is as without
        jobs.check_same(runs[STORED], reference[FP8], 4e-3, 1e-1)
        assert runs[STORED].losses[1] == runs[FP8].losses[1] and runs[STORED].losses != runs[FP8].losses


def check_statistics(found, wanted):
    """Ranks that share weights and tokens, and stages, say together what one process says.

    In the first step that is the same of all weights and of the first layer's input. All else parts: where bfloat16
    rounds otherwise, fp8 may take its neighbour, which is 6 % away. In 78 runs from 6 seeds of the weights the
    greatest number of a tensor was at most 0.11 off, and 0.014 in a step's mean.
    """
    assert found.steps.keys() == wanted.steps.keys() and found.steps
    assert found.in_16_bits.keys() == wanted.in_16_bits.keys()
    for step, tensors in wanted.steps.items():
        assert found.steps[step].keys() == tensors.keys()
        for tensor, want in tensors.items():
            check_shares(step, tensor, found.steps[step][tensor], want)
        # gradients are as many times greater as ranks have tokens of their own
        amaxes = {name: want["amax"] for name, want in tensors.items() if not name.endswith("grad_output")}
        apart = {name: abs(found.steps[step][name]["amax"] / amax - 1) for name, amax in amaxes.items()}
        assert max(apart.values()) < 0.17 and np.mean([*apart.values()]) < 0.025, (step, apart)
        same = [apart[name] for name in apart if name == "0.qkv.input" or name.endswith("weight")]
        assert step > 1 or len(same) > 3 and max(same) == 0, apart


def check_shares(step, tensor, got, want):
    """What becomes of a tensor's numbers; the greatest differences are of the same runs."""
    where = step, tensor, got, want
    # what attention in fp8 gives lies on a grid, which another scale moves: 0.016 of twice e4m3's 0.0225; others: 0.001
    bound = 2.5e-2 if tensor.endswith(("proj.input", "qkv.grad_output")) else 2e-3
    assert abs(got["relative_error"] - want["relative_error"]) < bound, where
    assert abs(got["underflows"] - want["underflows"]) < 2e-3, where  # 0.0008
    assert step == 1 or abs(got["range"] / want["range"] - 1) < 0.5, where  # 0.32; the first scales are of no amax


def check_states(runs, reference):
    """The optimizer's states, and when it updates."""
    for name in in_both(COMPACT, runs):
        jobs.check_same(runs[name], reference[NONE_BF16], 5e-3, 2e-2)
        for rank, plain in zip(runs[name].sizes, runs[NONE_BF16].sizes, strict=True):
            if name == COMPACT[0]:
                assert rank["state_bytes"] == 6 * rank["moments"] == plain["state_bytes"] / 2
            else:
                assert 4 / 12 < rank["state_bytes"] / plain["state_bytes"] < 4.8 / 12
    if EARLY in runs:
        jobs.check_same(runs[EARLY], runs[ORDINARY], 0, 0)
        jobs.check_same(runs[LATE], reference[LATE], 1e-5, 1e-5)
        assert jobs.loss_difference(runs[LATE], reference["pd"]) > 1e-3  # it was clipped
    if OFFLOADED in runs:
        jobs.check_same(runs[OFFLOADED], runs[FP8], 0, 0)
        for rank, plain in zip(runs[OFFLOADED].sizes, runs[FP8].sizes, strict=True):
            assert rank["host_bytes"] > 0.8 * rank["state_bytes"] and plain["host_bytes"] == 0


def check_frozen(run, plain):
    """What has changed in `plain` and not in `run`, and that no rank has states of it."""
    frozen = {name for name in run.weights if re.search(r"embed_tokens|layers\.0\.|norm", name)}
    assert frozen and frozen < run.weights.keys()
    assert all((run.weights[name] != plain.weights[name]).any() for name in run.weights)
    assert sum(rank["moments"] for rank in run.sizes) < sum(rank["moments"] for rank in plain.sizes)


def test_impossible_layout_by_hand(tmp_path, warm_host):
    """run_pretrain.py under Paddle's launcher, without this project's: every rank says why, in one line, and stops."""
    command = [sys.executable, "-m", "paddle.distributed.launch", "--devices", "0,1"]
    command += ["--log_dir", tmp_path / "logs", SCRIPT]
    flags = "--model_name_or_path tiny-llama-demo --tokenizer_name_or_path none --mock_data true --max_seq_length 32"
    command += [*flags.split(), "--output_dir", tmp_path / "out", "--pipeline_parallel_degree", "2"]
    environment = os.environ | warm_host | dict(PYTHONPATH=python_path())
    done = run(command, env=environment)
    assert done.returncode
    for rank in range(2):
        log = (tmp_path / f"logs/workerlog.{rank}").read_text()
        assert "--gradient_accumulation_steps 1 must be at least --pipeline_parallel_degree 2" in log.splitlines()[-1]
        assert "Traceback" not in log
    assert not (tmp_path / "out").exists()
