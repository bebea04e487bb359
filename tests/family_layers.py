"""Decoder layers of families that are not a Llama's: our arguments, and the same weights for all. NumPy only."""

import numpy as np

HIDDEN, FFN, HEADS, KV_HEADS, BATCH, TOKENS, WINDOW = 32, 48, 4, 2, 2, 12, 5
SIZES = dict(
    hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=8
)
NORM = dict(qk_norm_type="RMSNorm", qk_norm_before_rope=True)
GEMMA = dict(norms="both", zero_centered_gamma=True, qk_norm_zero_centered_gamma=True, activation="geglu")
# family: (TransformerLayer's arguments, size of a head, how much of it is rotated, the angles' base, epsilon)
FAMILIES = {
    "olmo2": (dict(norms="after", qk_norm_over="all", **NORM), 8, 1.0, 1e4, 1e-5),
    "glm4": (dict(norms="both", rotary_pos_interleaved=True, add_qkv_bias=True), 16, 0.5, 1e4, 1e-6),
    "gemma3": (dict(window_size=(WINDOW - 1, 0), **GEMMA, **NORM), 16, 1.0, 1e6, 1e-6),
    "phi3": (dict(), 8, 0.75, 1e4, 1e-5),
    "qwen3": (dict(NORM), 16, 1.0, 1e6, 1e-6),
}
AFTER = {  # their norms behind attention and behind the MLP, and before the MLP, where these have other names
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm", None),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm", "post_attention_layernorm"),
    "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm"),
}


def parts(family):
    """{our name of a parameter: transformers' names, which lie one after another in it}."""
    options, *_ = FAMILIES[family]
    fused = family in ("glm4", "phi3")
    qkv = ["self_attn.qkv_proj"] if family == "phi3" else [f"self_attn.{part}_proj" for part in "qkv"]
    fc1 = ["mlp.gate_up_proj"] if fused else ["mlp.gate_proj", "mlp.up_proj"]
    after_attention, after_mlp, before_mlp = AFTER.get(family, (None, None, "post_attention_layernorm"))
    names = {
        "self_attention.layernorm_qkv.ln_weight": [before_mlp and "input_layernorm"],
        "self_attention.layernorm_qkv.weight": qkv,
        "self_attention.proj.weight": ["self_attn.o_proj"],
        "self_attention.post_norm.weight": [after_attention],
        "layernorm_mlp.ln_weight": [before_mlp],
        "layernorm_mlp.fc1_weight": fc1,
        "layernorm_mlp.fc2_weight": ["mlp.down_proj"],
        "layernorm_mlp.post_norm.weight": [after_mlp],
    }
    if "qk_norm_type" in options:
        names |= {f"self_attention.{part}_norm.weight": [f"self_attn.{part}_norm"] for part in "qk"}
    found = {ours: [f"{name}.weight" for name in theirs] for ours, theirs in names.items() if all(theirs)}
    if "add_qkv_bias" in options:
        found["self_attention.layernorm_qkv.bias"] = [f"{name}.bias" for name in qkv]
    return found


def values(family, shapes, seed):
    """{name: float32 array} of our parameters, whose shapes these are, and of x and dy."""
    generator = np.random.default_rng([seed, [*FAMILIES].index(family)])
    shapes = dict(sorted(shapes.items())) | {"x": [BATCH, TOKENS, HIDDEN], "dy": [BATCH, TOKENS, HIDDEN]}
    drawn = {name: generator.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    for name, shape in shapes.items():
        drawn[name] *= 0.2 if len(shape) < 3 else 1
        if "norm.weight" in name or "ln_weight" in name:
            drawn[name] += family != "gemma3"
    return drawn


def digest(array):
    """Some of its numbers, and the sums of its rows and columns."""
    rows = np.asarray(array, "float64").reshape(-1, np.shape(array)[-1])
    return np.concatenate([rows.ravel()[:: max(1, rows.size // 24)], rows.sum(0)[:8], rows.sum(1)[:8]]).tolist()
