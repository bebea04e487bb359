"""Training goes on in another layout of processes: its losses are those of a run that had that layout all along.

Weights, moments, master weights and fp8 scales of tensor, pipeline and sharding parallelism, saved per rank or unified,
resume as they are in each other and in one process, to the last bit; and every layout starts directly from a Hugging
Face folder.
"""

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_te.weights import convert
from tests.multiprocess.distributed import jobs

NAMES = ["none", "pd", "none_bf16", "pd_fp8", "none_unclipped"]
COMPACT = "none_bf16_compact"  # moments in bfloat16, remainders of master weights
MUON = (
    "pd_muon"  # whose tensor parallel ranks send pieces of updates to one rank, and whose matrices have a momentum only
)
# bf16 and fp8: a rounding may fall the other way
TOLERANCE = {"none": 1e-5, "pd": 1e-5, MUON: 1e-5, "none_bf16": 1e-3, COMPACT: 1e-3, "pd_fp8": 1e-3}
TOLERANCE |= {"none_unclipped": 1e-5}
FP8 = dict(use_fp8=True, fp8_lm_head=True, fp8_amax_history_len=4)  # emulated, in float32
STEPS = range(jobs.SAVED_STEP + 1, jobs.STEPS + 1)
# Stage 1 with split_param, as OVERLAP=1 has it: of each parameter a rank may have a part
SPLIT = jobs.BF16 | {jobs.SHARDING: 2, "sharding": "stage1"}
SPLIT |= {"sharding_parallel_config": "split_param enable_stage1_overlap"}
# layout: (processes, flags, what it saves, what it goes on with: (layout, what that saved))
LAYOUTS = {
    "tp2": (2, {jobs.TP: 2}, [*NAMES[:4], MUON, f"unified_{COMPACT}"], []),
    "split2": (2, SPLIT, ["none_bf16", "unified_none_bf16", COMPACT], [("tp2", "none_bf16")]),
    "pp2": (
        2,
        {jobs.PP: 2},
        [*NAMES, "unified_none"],
        [*(("tp2", name) for name in NAMES[:4]), ("split2", "none_bf16"), ("tp2", "none to pd")],
    ),
    "one": (
        1,
        {},
        [*NAMES, MUON, COMPACT],
        [
            ("tp2", "none"),
            ("tp2", MUON),
            ("tp2", "pd_fp8"),
            ("pp2", "pd_fp8"),
            ("pp2", "none_unclipped"),
            ("pp2", "unified_none"),
        ]
        + [("split2", name) for name in ("none_bf16", "unified_none_bf16", COMPACT)]
        + [("tp2", f"unified_{COMPACT}")],
    ),
}
MOVED = [(run, name, layout) for layout, (*_, moved) in LAYOUTS.items() for run, name in moved]


def variant(name, init, **flags):
    plain = name.removeprefix("unified_")
    made = jobs.variant(plain.replace("pd_fp8", "pd"), init) | dict(name=name)
    made |= dict(unified_checkpoint=True) if name != plain else {}
    return made | (FP8 if plain == "pd_fp8" else {}) | flags


def saving(name, init):
    return variant(name, init, save_strategy="steps", save_steps=jobs.SAVED_STEP)


def resumed(run, name, folder, init):
    """A variant that goes on from run's checkpoint of `name` ("none to pd": with the other backend)."""
    saved, _, target = name.partition(" to ")
    checkpoint = folder / run / saved / f"checkpoint-{jobs.SAVED_STEP}"
    flags = dict(resume=str(checkpoint), save_what_is_loaded=True, unified_checkpoint=False)
    return variant(target or saved, init, **flags) | dict(name=f"{run} {name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resharded")


@pytest.fixture(scope="module")
def runs(folder, warm_host):
    """{layout: {variant: Run}} of all that these tests look at, one launch a layout."""
    init = jobs.make_initial_weights(folder, layers=4)
    convert(init["none"], folder / "hf", "pd2hf")
    hf = dict.fromkeys(init, str(folder / "hf")) | dict(model=init["model"])
    made = {}
    for layout, (processes, flags, names, moved) in LAYOUTS.items():
        variants = [saving(name, init) for name in names]
        if layout != "split2":
            variants += [variant(name, hf) | dict(name=f"{name}_hf") for name in ("none", "pd")]
        variants += [resumed(run, name, folder, init) for run, name in moved]
        made[layout] = jobs.launch(folder / layout, processes, flags, variants, "nvgpu", warm_host)
    return made


@pytest.mark.parametrize("run, name, layout", MOVED)
def test_goes_on(runs, run, name, layout):
    got = runs[layout][f"{run} {name}"]
    plain = (name.partition(" to ")[2] or name).removeprefix("unified_")
    whole = runs[layout][plain]
    assert sorted(got.losses) == list(STEPS)
    assert got.losses == pytest.approx({step: whole.losses[step] for step in STEPS}, rel=TOLERANCE[plain])
    # a pipeline computes each micro-batch as one process does, and clipping alone would add up otherwise
    if (run, name) == ("pp2", "none_unclipped"):
        assert got.losses == {step: whole.losses[step] for step in STEPS}
        assert jobs.weight_difference(got, whole) == 0


@pytest.mark.parametrize("run, name, layout", [moved for moved in MOVED if moved[1] != MUON])
def test_what_is_loaded_is_what_was_saved(runs, folder, run, name, layout):
    """Weights, moments, powers, master weights and fp8 scales, to the last bit. The converter refuses Muon's state."""
    saved, _, target = name.partition(" to ")
    output = folder / "whole" / f"{layout} {run} {name}"
    was = whole_state(folder / run / saved, output / "saved", "bf16" in name, "pd2te" if target else "reshard")
    check_states(whole_state(folder / layout / f"{run} {name}", output / "loaded", "bf16" in name), was)
    assert bool(was["fp8"]) == ("fp8" in name)


def whole_state(output_dir, folder, masters, mode="reshard"):
    """{file: {name: array}} of a run's checkpoint, which the converter makes one of a single process in `folder`."""
    convert(output_dir / f"checkpoint-{jobs.SAVED_STEP}", folder, mode, with_optimizer=True, progress=False)
    stems = ["model", "optimizer", *(["master_weights"] if masters else [])]
    found = {stem: load_file(folder / f"{stem}-00001-of-00001.safetensors") for stem in stems}
    return found | dict(fp8=scales(folder))


def check_states(got, want):
    """Two of `whole_state` are the same to the last bit."""
    for stem, tensors in want.items():
        assert tensors.keys() == got[stem].keys()
        assert [key for key in tensors if tensors[key].tobytes() != got[stem][key].tobytes()] == []
    assert all(np.abs(tensor).max() > 0 for tensor in want["optimizer"].values())


def scales(folder):
    """{layer, direction, what: array} of all pipeline stages' fp8 state."""
    found = {}
    for file in folder.glob("fp8_state.pp*.pdparams"):
        for layer, module in paddle.load(str(file), return_numpy=True)["modules"].items():
            for direction in ("forward", "backward"):
                found |= {(layer, direction, what): np.asarray(a) for what, a in module[direction].items()}
    return found


@pytest.mark.parametrize("layout", ["tp2", "pp2", "one"])
@pytest.mark.parametrize("name", ["none", "pd"])
def test_starts_from_a_hugging_face_folder(runs, layout, name):
    assert runs[layout][f"{name}_hf"].losses == runs[layout][name].losses


def test_a_fresh_optimizer_would_show(runs):
    """The tolerances are far below what a step of Adam without its moments changes."""
    losses = runs["one"]["none"].losses
    assert all(abs(losses[step + 1] - losses[step]) > 10 * 1e-5 * losses[step] for step in STEPS if step + 1 in losses)


def test_the_log_says_from_which_layout_to_which(runs, folder):
    log = "".join(path.read_text(errors="replace") for path in (folder / "pp2/logs").glob("workerlog.*"))
    here = "this run's layout is pipeline parallel 2, and each rank reads its share"
    assert f"its layout is tensor parallel 2; {here}" in log
    assert f"its layout is tensor parallel 2, in PaddleNLP's native layout; {here}" in log
    log = (folder / "one/output.log").read_text()
    assert "a unified checkpoint whose layout was pipeline parallel 2; this run's layout is undivided" in log
