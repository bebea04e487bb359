"""The model class of ours, as Qwen3, in layouts of several processes on nvgpu's host runtime: against one process.

Heads are wider than hidden_size / num_attention_heads, q and k have norms, and the head is the embedding, of which the
first and the last stage of a pipeline have copies.
"""

import pytest

from tests.multiprocess.distributed import jobs

QWEN3 = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=32, tie_word_embeddings=True)
QWEN3 |= dict(bos_token_id=1, eos_token_id=2)
EXACT, BF16, FP8 = (1e-5, 1e-5), (5e-3, 2e-2), (1e-2, 1e-1)
# {layout: (processes, flags, {variant: (reference, tolerances)}, variants to resume)}
LAYOUTS = {
    "sp_tp2_pp2": (
        4,
        {jobs.TP: 2, jobs.PP: 2, "sequence_parallel": "true"},
        {"pd_tight": ("pd_tight", EXACT), "pd_fused": ("pd", EXACT), "te_fp8_head_wgrad": ("te_fp8", FP8)},
        ["te_fp8_head_wgrad"],
    ),
    "pp3_vp2": (*jobs.LAYOUTS["pp3_vp2"], {"pd_full": ("pd", EXACT), "te_bf16": ("te_bf16", BF16)}, []),
    "sep2_sharding1": (
        4,
        {jobs.SEP: 2, jobs.SHARDING: 2, "sharding": "stage1"},
        {"pd_packed": ("pd_packed", EXACT), "pd_ring_core_attn": ("pd", EXACT), "te_bf16_full": ("te_bf16", BF16)},
        ["pd_packed"],
    ),
}


# Further families, each with what no other has: a window and a part of each head turned; norms of all heads together,
# of which each rank of tensor parallelism has some; four norms, neighbouring numbers turned together.
FAMILIES = {
    "phi3": dict(hidden_size=128, partial_rotary_factor=0.5, sliding_window=20),
    "olmo2": dict(num_key_value_heads=4),
    "glm4": dict(head_dim=32, attention_bias=False),
}


@pytest.fixture(scope="module")
def initial_weights(tmp_path_factory):
    return jobs.make_own_weights(tmp_path_factory.mktemp("weights"), **QWEN3)


@pytest.fixture(scope="module")
def references(tmp_path_factory, initial_weights, warm_host):
    return jobs.references(tmp_path_factory.mktemp("reference"), LAYOUTS, initial_weights, warm_host)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, tmp_path, references, initial_weights, warm_host):
    jobs.check_layout(LAYOUTS[layout], tmp_path, initial_weights, references, warm_host)


def test_further_families(tmp_path, warm_host):
    processes, flags, *_ = LAYOUTS["sp_tp2_pp2"]
    tokens, variants, in_te = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0), [], []
    for family, own in FAMILIES.items():
        weights = jobs.make_own_weights(tmp_path / family, num_hidden_layers=2, model_type=family, **tokens, **own)
        variants.append(jobs.variant("pd", weights) | dict(name=family))
        in_te.append(jobs.variant("te_fp8_full", weights) | dict(name=f"te's {family}"))
    environment = warm_host | dict(EMULATED_TE="1")
    whole = jobs.launch(tmp_path / "whole", 1, {}, variants + in_te, "nvgpu", environment)
    shared = jobs.launch(tmp_path / "shared", processes, flags, variants, "nvgpu", environment)
    for family in FAMILIES:
        jobs.check_same(shared[family], whole[family], *EXACT)
        assert jobs.loss_difference(whole[f"te's {family}"], whole[family]) < 1e-2
