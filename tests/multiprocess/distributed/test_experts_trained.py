"""PaddleNLP's Trainer with a mixture of experts that ranks divide, on nvgpu's host runtime: against one process.

And what such ranks save: it resumes to the bit, goes on in one process with its optimizer, and converts to one file.
"""

import pytest

from paddle_te.options.launcher import OVERLAPS
from paddle_te.weights import convert, safetensors
from tests.multiprocess.distributed import jobs

MODEL = dict(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_hidden_layers=3,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    mlp_only_layers=[1],
    router_aux_loss_coef=0.01,
    bos_token_id=1,
    eos_token_id=2,
)
EXACT, BF16 = (1e-6, 1e-5), (5e-3, 2e-2)
EP = jobs.BF16 | {
    jobs.SHARDING: 2,
    "sharding": "stage1",
    "sharding_parallel_config": OVERLAPS["stage1"],
    "expert_parallel_degree": 2,
    "logging_steps": 2,
}
# In ep2 two pairs of ranks divide the experts each, in ep2_pp2 the two ranks of each stage do.
# layout: (processes, flags, {variant: (reference, tolerances)}, variants to resume)
LAYOUTS = {
    "tp2": (2, {jobs.TP: 2}, {"pd_tight": ("pd_tight", EXACT)}, []),
    "sp_tp2": (
        2,
        {jobs.TP: 2, "sequence_parallel": "true"},
        {"pd_tight": ("pd_tight", EXACT), "te_bf16": ("te_bf16", BF16)},
        ["te_bf16"],
    ),
    "ep2": (4, EP | {jobs.SHARDING: 4}, {"te_fp8": ("te_fp8", (2e-2, 1e-1))}, ["te_fp8"]),
    "ep2_pp2": (
        4,
        EP | {jobs.PP: 2},
        {name: (name, BF16) for name in ("pd_bf16", "pd_bf16_muon")},
        ["pd_bf16", "pd_bf16_muon"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def weights(folder):
    return jobs.make_own_weights(folder / "weights", **MODEL)


@pytest.fixture(scope="module")
def ranks(folder, weights, warm_host):
    """{layout: {variant: Run}} of several processes."""
    made = {}
    for layout, (processes, flags, expected, resumed) in LAYOUTS.items():
        variants = jobs.variants([*expected], weights, folder / layout, resumed)
        environment = warm_host | dict(EMULATED_TE="hopper")
        made[layout] = jobs.launch(folder / layout, processes, flags, variants, "nvgpu", environment)
    return made


@pytest.fixture(scope="module")
def one(folder, weights, ranks, warm_host):
    """{variant: Run} of one process, which also goes on from four ranks' checkpoint."""
    names = {reference for _, _, expected, _ in LAYOUTS.values() for reference, _ in expected.values()}
    variants = jobs.variants(sorted(names), weights, folder / "one")
    checkpoint = folder / "ep2_pp2/pd_bf16" / f"checkpoint-{jobs.SAVED_STEP}"
    moved = dict(name="moved", resume=str(checkpoint), save_what_is_loaded=True)
    variants.append(jobs.variant("pd_bf16", weights) | moved)
    return jobs.launch(folder / "one", 1, dict(), variants, "nvgpu", warm_host | dict(EMULATED_TE="hopper"))


def logged_as(layout, run):
    """A Run of one process, with losses of as many steps each as a layout has a line for."""
    return jobs.logged_every(run, LAYOUTS[layout][1].get("logging_steps", 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, ranks, one):
    for name, (reference, tolerances) in LAYOUTS[layout][2].items():
        got, want = ranks[layout][name], one[reference]
        jobs.check_same(got, logged_as(layout, want), *tolerances)


@pytest.mark.parametrize("layout, name", [(layout, name) for layout, (*_, names) in LAYOUTS.items() for name in names])
def test_resumed_to_the_bit(layout, name, ranks):
    jobs.check_same(ranks[layout][f"{name}_resumed"], jobs.later(ranks[layout][name]), 0, 0)


def test_experts_of_all_ranks_are_saved(folder, ranks):
    saved = folder / "ep2_pp2/pd_bf16" / f"checkpoint-{jobs.SAVED_STEP}"
    names = sorted(path.name for path in saved.glob("*state.*") if path.suffix == ".pdparams")
    assert names == [f"model_state.pp{stage:02d}_ep{rank:02d}.pdparams" for stage in range(2) for rank in range(2)]
    convert(saved, folder / "hf", "te2hf")
    (file,) = (folder / "hf").glob("*.safetensors")
    names = [name for name in safetensors.read(file) if ".mlp.experts." in name]
    assert len(names) == 2 * 4 * 3  # layers with experts, experts, matrices


def test_goes_on_in_one_process(folder, one, ranks):
    """Weights and the optimizer's state are those that the four ranks have saved."""
    saved = [folder / "ep2_pp2/pd_bf16", folder / "one/moved"]
    whole = []
    for number, path in enumerate(saved):
        out = folder / f"whole{number}"
        convert(path / f"checkpoint-{jobs.SAVED_STEP}", out, "reshard", with_optimizer=True)
        whole.append({path.name: path.read_bytes() for path in out.glob("*.safetensors")})
    assert whole[0] and whole[0] == whole[1]
    jobs.check_same(logged_as("ep2_pp2", one["moved"]), ranks["ep2_pp2"]["pd_bf16_resumed"], *BF16)
