"""Training goes on in another layout of processes: its losses are those of a run that had that layout all along.

Weights, moments, master weights and fp8 scales of TP2 resume under PP2 and in one process, those of PP2 in one process;
and every layout starts directly from a Hugging Face folder.
"""

import pytest

from paddle_te.weights import convert
from tests.distributed import jobs

NAMES = ["none", "pd", "none_bf16", "pd_fp8"]
# bf16 and fp8: a rounding may fall the other way
TOLERANCE = {"none": 1e-5, "pd": 1e-5, "none_bf16": 1e-3, "pd_fp8": 1e-3}
FP8 = dict(use_fp8=True, fp8_lm_head=True, fp8_amax_history_len=4)  # emulated, in float32
STEPS = range(jobs.SAVED_STEP + 1, jobs.STEPS + 1)


def variant(name, init, **flags):
    made = jobs.variant(name.replace("pd_fp8", "pd"), init) | dict(name=name) | flags
    return made | FP8 if name.startswith("pd_fp8") else made


def saving(name, init):
    return variant(name, init, save_strategy="steps", save_steps=jobs.SAVED_STEP)


def resumed(run, name, mode, folder, init):
    """A variant that goes on from run's checkpoint of `name`, converted; name after pd2te: the pd backend's."""
    converted = folder / f"{run}_{name}_{mode}"
    if not converted.exists():
        saved = folder / run / name / f"checkpoint-{jobs.SAVED_STEP}"
        assert convert(saved, converted, mode, with_optimizer=True, progress=False) == []
    target = "pd" if mode == "pd2te" else name
    return variant(target, init, unified_checkpoint=True, resume=str(converted)) | dict(name=f"{run}_{name}_{mode}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, nvgpu_host):
    """{layout: {variant: Run}} of all that these tests look at, one launch a layout."""
    folder = tmp_path_factory.mktemp("resharded")
    init = jobs.make_initial_weights(folder, layers=4)
    convert(init["none"], folder / "hf", "pd2hf")
    hf = dict.fromkeys(init, str(folder / "hf")) | dict(model=init["model"])
    from_hf = [variant(name, hf) | dict(name=f"{name}_hf") for name in ("none", "pd")]
    made = {}

    def launch(name, processes, flags, variants, device="nvgpu", environment=nvgpu_host):
        environment = environment | dict(NVGPU_HOST_DEVICES=str(processes))
        made[name] = jobs.launch(folder / name, processes, flags, variants, device, environment)

    launch("tp2", 2, {jobs.TP: 2}, [saving(name, init) for name in NAMES] + from_hf)
    from_tp2 = [("none", "reshard"), ("none", "pd2te"), ("pd", "reshard"), ("none_bf16", "reshard")]
    from_tp2 += [("pd_fp8", "reshard")]
    going_on = [resumed("tp2", name, mode, folder, init) for name, mode in from_tp2]
    launch("pp2", 2, {jobs.PP: 2}, [saving(name, init) for name in NAMES] + from_hf + going_on)
    in_one = [("tp2", "none"), ("tp2", "pd_fp8"), ("pp2", "pd"), ("pp2", "pd_fp8")]
    going_on = [resumed(run, name, "reshard", folder, init) for run, name in in_one]
    launch("one", 1, {}, [variant(n, init) for n in NAMES if n != "none_bf16"] + from_hf + going_on, "cpu", {})
    return made


def check(runs, layout, run, name, mode):
    got = runs[layout][f"{run}_{name}_{mode}"].losses
    whole = runs[layout]["pd" if mode == "pd2te" else name].losses
    assert sorted(got) == list(STEPS)
    assert got == pytest.approx({step: whole[step] for step in STEPS}, rel=TOLERANCE[name])


@pytest.mark.parametrize("name, mode", [*((name, "reshard") for name in NAMES), ("none", "pd2te")])
def test_tp2_goes_on_under_pp2(runs, name, mode):
    check(runs, "pp2", "tp2", name, mode)


@pytest.mark.parametrize("run, name", [("tp2", "none"), ("tp2", "pd_fp8"), ("pp2", "pd"), ("pp2", "pd_fp8")])
def test_goes_on_in_one_process(runs, run, name):
    check(runs, "one", run, name, "reshard")


@pytest.mark.parametrize("layout", ["tp2", "pp2", "one"])
@pytest.mark.parametrize("name", ["none", "pd"])
def test_starts_from_a_hugging_face_folder(runs, layout, name):
    assert runs[layout][f"{name}_hf"].losses == runs[layout][name].losses


def test_a_fresh_optimizer_would_show(runs):
    """The tolerances are far below what a step of Adam without its moments changes."""
    losses = runs["one"]["none"].losses
    assert all(abs(losses[step + 1] - losses[step]) > 10 * 1e-5 * losses[step] for step in STEPS if step + 1 in losses)
