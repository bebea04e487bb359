"""The model class of ours in layouts of several processes on nvgpu's host runtime: against one process.

The code that divides a model over ranks does not depend on the family. Each layout therefore trains only the families
that could fail in it, and each of these families is in some layout: Qwen3 with heads wider than hidden_size /
num_attention_heads, norms of q and k, and a tied head, of which the first and the last stage of a pipeline have
copies; Phi-4-mini's with a part of each head turned, and factors that change with the length; OLMo-2's with norms of
all heads together, of which each rank of tensor parallelism has some, and which come before SEP's exchange; GLM-4's
with four norms, and neighbouring numbers turned together; Gemma's with scaled embeddings, soft caps, and a window and
angles of its own in each layer. Layers of GLM-4 and Gemma 3 under tensor parallelism: unit/ops/test_te_parallel.py.
"""

import numpy as np
import pytest

from tests.multiprocess.distributed import jobs

TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, num_hidden_layers=2)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[1.0 + i for i in range(8)])
FAMILIES = {
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], head_dim=32, tie_word_embeddings=True),
    "phi3": dict(
        hidden_size=128, partial_rotary_factor=0.5, sliding_window=20, rope_scaling=LONG,
        original_max_position_embeddings=24,
    ),
    "olmo2": dict(num_key_value_heads=4),
    "glm4": dict(head_dim=32, attention_bias=False),
    "gemma2": dict(head_dim=32, sliding_window=9, attn_logit_softcapping=4.0, final_logit_softcapping=3.0),
    "gemma3_text": dict(head_dim=32, sliding_window=9, sliding_window_pattern=2, num_hidden_layers=6),
}  # fmt: skip
EXACT, BF16, FP8 = (1e-5, 1e-5), (5e-3, 2e-2), (1e-2, 1e-1)
STAGE2 = dict(sharding="stage2", sharding_parallel_config="enable_stage2_overlap", logging_steps=2)
# {layout: (processes, flags, {(family, variant): (variant in one process, tolerances)})}
LAYOUTS = {
    "sp_tp2_pp2": (
        4,
        {jobs.TP: 2, jobs.PP: 2, "sequence_parallel": "true"},
        {
            ("qwen3", "pd_tight"): ("pd_tight", EXACT),
            ("qwen3", "te_fp8_head"): ("te_fp8", FP8),
            ("phi3", "pd"): ("pd", EXACT),
            ("olmo2", "pd"): ("pd", EXACT),
            ("gemma2", "pd_fused"): ("pd", EXACT),
        },
    ),
    "pp3_vp2": (
        *jobs.LAYOUTS["pp3_vp2"],
        {("gemma3_text", "pd_full"): ("pd", EXACT), ("gemma3_text", "te_bf16"): ("te_bf16", BF16)},
    ),
    "sep2_sharding1": (
        4,
        {jobs.SEP: 2, jobs.SHARDING: 2, "sharding": "stage1"},
        {
            ("gemma3_text", "pd_packed"): ("pd_packed", EXACT),
            ("qwen3", "pd_ring_core_tight"): ("pd_tight", EXACT),
            ("glm4", "te_bf16_full"): ("te_bf16", BF16),
            ("olmo2", "te_bf16"): ("te_bf16", BF16),
        },
    ),
    "sharding2_overlap": (2, {jobs.SHARDING: 2} | STAGE2, {("phi3", "te_bf16"): ("te_bf16", BF16)}),
}
RESUMED = [
    ("sp_tp2_pp2", "qwen3", "te_fp8_head"),
    ("sep2_sharding1", "gemma3_text", "pd_packed"),
]
# What goes on in another layout, with the optimizer's state: (family, variant, from, to)
MOVED = [("qwen3", "pd_tight", "sp_tp2_pp2", "sharding2_overlap"), ("olmo2", "pd", "sp_tp2_pp2", "sharding2_overlap")]
CASES = [(layout, *case) for layout, (*_, expected) in LAYOUTS.items() for case in expected]


def named(family, variant, init, **flags):
    """train.py's flags of a variant."""
    name = flags.get("name", variant)
    return jobs.variant(variant, init[family]) | flags | dict(name=f"{family}.{name}")


def going_on(folder, family, name, init):
    """The same from a checkpoint under a folder."""
    checkpoint = folder / f"{family}.{name}" / f"checkpoint-{jobs.SAVED_STEP}"
    return named(family, name, init, name=f"{name}_resumed", resume=str(checkpoint))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, warm_host):
    """{layout, or "one": {family.variant: Run}}, one launch each."""
    root, environment = tmp_path_factory.mktemp("layouts"), warm_host | dict(EMULATED_TE="1")
    init = {
        family: jobs.make_own_weights(root / family, model_type=family, **TOKENS | own)
        for family, own in FAMILIES.items()
    }
    alone = {(family, one) for *_, expected in LAYOUTS.values() for (family, _), (one, _) in expected.items()}
    alone |= {(family, name) for family, name, *_ in MOVED}
    made = {
        "one": jobs.launch(root / "one", 1, {}, [named(*each, init) for each in sorted(alone)], "nvgpu", environment)
    }
    for layout, (processes, flags, expected) in LAYOUTS.items():
        saved = {each[1:] for each in RESUMED if each[0] == layout} | {each[:2] for each in MOVED if each[2] == layout}
        saves = dict(save_strategy="steps", save_steps=jobs.SAVED_STEP)
        variants = [named(*each, init, **saves if each in saved else {}) for each in expected]
        variants += [going_on(root / layout, *each, init) for where, *each in RESUMED if where == layout]
        variants += [going_on(root / start, *each, init) for *each, start, end in MOVED if end == layout]
        made[layout] = jobs.launch(root / layout, processes, flags, variants, "nvgpu", environment)
    return made


def logged(run, like):
    """A run whose losses are the means over the steps that another one has logged together."""
    steps = sorted(like.losses)
    every = steps[1] - steps[0] if len(steps) > 1 else STAGE2["logging_steps"]
    means = {step: float(np.mean([run.losses[step - i] for i in range(every)])) for step in steps}
    return run._replace(losses=means)


@pytest.mark.parametrize("layout, family, name", CASES)
def test_layout(runs, layout, family, name):
    one, tolerances = LAYOUTS[layout][2][family, name]
    got = runs[layout][f"{family}.{name}"]
    jobs.check_same(got, logged(runs["one"][f"{family}.{one}"], got), *tolerances)


@pytest.mark.parametrize("layout, family, name", RESUMED)
def test_resumed(runs, layout, family, name):
    jobs.check_resumed(runs[layout], f"{family}.{name}")


@pytest.mark.parametrize("family, name, start, end", MOVED)
def test_goes_on_in_another_layout(runs, family, name, start, end):
    got, whole = runs[end][f"{family}.{name}_resumed"], runs["one"][f"{family}.{name}"]
    jobs.check_same(got, logged(whole, got), 1e-5, 1e-5)


# Experts, of which ranks have some whole: in GLaM's and DeepSeek's second layer only; shared experts, of which they
# have shares; GLaM's positions, biases and tied head; Granite's factors, of which first and last stage have one; latent
# attention, of which each rank has the projections to latent vectors whole.
PLAIN = dict(router_aux_loss_coef=0.0)
EXPERTS = {
    "deepseek_v3": dict(
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=32, first_k_dense_replace=1, n_group=2,
        topk_group=1, aux_loss_alpha=0.01,
    ),
    "qwen2_moe": PLAIN | dict(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "glam": PLAIN | dict(num_experts=4, num_key_value_heads=4, tie_word_embeddings=True),
    "granitemoe": PLAIN | dict(
        num_local_experts=4, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0
    ),
}  # fmt: skip


def test_experts(tmp_path, warm_host):
    """Without te, whose experts want a newer cuBLAS: tests of layers emulate it."""
    variants, sizes = [], dict(num_experts_per_tok=2, num_hidden_layers=2)
    for family, own in EXPERTS.items():
        said = dict(model_type=family) | TOKENS | sizes | own
        init = jobs.make_own_weights(tmp_path / family, **said)
        variants.append(jobs.variant("pd", init) | dict(name=family))
    whole = jobs.launch(tmp_path / "whole", 1, {}, variants, "nvgpu", warm_host)
    processes, flags = jobs.LAYOUTS["tp2_pp2"]
    flags = flags | {"sequence_parallel": "true"}
    shared = jobs.launch(tmp_path / "shared", processes, flags, variants, "nvgpu", warm_host)
    for family in EXPERTS:
        jobs.check_same(shared[family], whole[family], *EXACT)
