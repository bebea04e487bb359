"""Small models of the families that have a model class of ours: what transformers and ours compute the same numbers of.

Imports nothing that either of the two needs, as `model_peers` runs where there is no Paddle.
"""

import zlib

import numpy as np

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
GRANITE = dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=6.0)
GEMMA = dict(head_dim=32, sliding_window=8, query_pre_attn_scalar=24)
LONG = dict(type="longrope", short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5], long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 9.0])
# attn_factor is vLLM's, which transformers leaves out, and a folder keeps
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, attn_factor=0.878)
DEEPSEEK = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    aux_loss_alpha=0.0,
    rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.8, mscale_all_dim=1.2, beta_fast=32,
        beta_slow=1,
    ),
)  # fmt: skip
# a name: what its config.json says in transformers' words, beside SIZES
MODELS = {
    "qwen3": dict(model_type="qwen3", head_dim=32, rope_theta=1e6),
    "phi3": dict(model_type="phi3", pad_token_id=0, sliding_window=24),
    "phi3-part": dict(model_type="phi3", pad_token_id=0, partial_rotary_factor=0.5),
    "olmo2": dict(model_type="olmo2", rope_theta=5e5, num_key_value_heads=4),
    "glm4": dict(model_type="glm4", head_dim=32, attention_bias=False, pad_token_id=0),
    "mixtral": dict(
        model_type="mixtral", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        router_aux_loss_coef=0.0,
    ),
    "qwen2_moe": dict(
        model_type="qwen2_moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        decoder_sparse_step=2,
        router_aux_loss_coef=0.0,
    ),
    "olmoe": dict(
        model_type="olmoe",
        num_hidden_layers=2,
        num_key_value_heads=4,
        num_experts=6,
        num_experts_per_tok=2,
        intermediate_size=32,
        router_aux_loss_coef=0.0,
    ),
    "granite": dict(model_type="granite", tie_word_embeddings=True, rms_norm_eps=1e-3) | GRANITE,
    "granitemoe": dict(
        model_type="granitemoe",
        intermediate_size=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        router_aux_loss_coef=0.0,
    )
    | GRANITE,
    "deepseek_v3": DEEPSEEK
    | dict(
        model_type="deepseek_v3",
        q_lora_rank=24,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        routed_scaling_factor=2.5,
        n_shared_experts=1,
    ),
    # as Moonlight: queries without a latent vector, one group, no scaling
    "deepseek_v3-direct": DEEPSEEK
    | dict(
        model_type="deepseek_v3",
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        rms_norm_eps=1e-5,
        rope_scaling=None,
    ),
    "deepseek_v2": DEEPSEEK
    | dict(
        model_type="deepseek_v2",
        q_lora_rank=None,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        topk_method="greedy",
        norm_topk_prob=False,
    ),
    # as DeepSeek-V2 with 236B
    "deepseek_v2-groups": DEEPSEEK
    | dict(
        model_type="deepseek_v2",
        q_lora_rank=24,
        n_group=4,
        topk_group=3,
        num_experts_per_tok=4,
        routed_scaling_factor=16.0,
        scoring_func="softmax",
        topk_method="group_limited_greedy",
        norm_topk_prob=False,
    ),
    # as Phi-4-mini: it goes from one list of factors to the other while it generates
    "phi3-long": dict(
        model_type="phi3",
        pad_token_id=0,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=24,
        rope_scaling=LONG,
        tie_word_embeddings=True,
    ),
    "gpt_oss": dict(
        model_type="gpt_oss",
        head_dim=32,
        intermediate_size=32,
        sliding_window=8,
        num_local_experts=6,
        num_experts_per_tok=4,
        rope_theta=150000.0,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
    ),
    "gemma2": dict(model_type="gemma2", attn_logit_softcapping=4.0, final_logit_softcapping=3.0) | GEMMA,
    "gemma3": dict(
        model_type="gemma3_text",
        sliding_window_pattern=2,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    )
    | GEMMA,
    "qwen3-tied": dict(model_type="qwen3", head_dim=8, tie_word_embeddings=True, rope_scaling=YARN),
}
LENGTH, PROMPT, NEW = 40, 7, 32


def config(name):
    """All that config.json says."""
    return SIZES | MODELS[name]


def weight(model, name, shape, seed):
    """float32 of the weight of that name in transformers' model; large enough that tokens differ."""
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape).astype(np.float32)
    if name.endswith("e_score_correction_bias"):
        return 0.2 * np.abs(values)  # transformers takes experts of other groups for 0
    if ("norm" in name or ".ln_" in name) and not name.endswith("bias"):
        return ("gemma" not in model or "post" in name) + 0.1 * values  # Gemma multiplies by 1 + weight
    if "sinks" in name or name.endswith("gate_up_proj"):  # sinks that count; few numbers where the clamp is not smooth
        return (1.0 if "sinks" in name else 0.3) * values
    scaled = "gemma" in model and "embed" in name  # else a token would say itself again
    return (0.05 if scaled else 0.15) * values


def tokens(seed):
    """int64 [2, LENGTH + 1]."""
    return np.random.default_rng([seed, 1]).integers(3, SIZES["vocab_size"], (2, LENGTH + 1))


def digest(array):
    """32 sums of an array's numbers, each with a weight of its own, to keep files small."""
    array = np.asarray(array, "float64").reshape(-1)
    return np.bincount(np.arange(array.size) % 32, array * np.cos(np.sqrt(np.arange(array.size))), 32)
