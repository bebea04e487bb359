"""Name the modules of a model in PaddleNLP's layout and in Hugging Face's, by a Family's `names`.

`layout` makes tables of tensors of them: a module's weight and bias have ".weight" and ".bias" after its name.
"""

from dataclasses import dataclass, field

# Modules that hold several parts
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclass(frozen=True)
class Names:
    """One layout's names.

    layer: {part of a decoder layer, or one of FUSED: its module}. sparse: the same of what a layer with experts has
    instead of an MLP, {expert} standing for an expert's number. layers: what stands before a layer's number. embed,
    norm, positions: the modules outside of the layers. base: what stands before all these names; None: the family's
    model_type and ".". transposed: the GEMMs' weights are [in, out]. stacked: all experts of a layer have one tensor,
    [experts, in, out], which is called as the module, and its biases _bias more; gate's and up's numbers take turns.
    """

    layer: dict[str, str]
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    positions: str = "embed_positions"
    base: str | None = None
    transposed: bool = False
    stacked: bool = False
    sparse: dict[str, str] = field(default_factory=dict)


_LLAMA = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "all_q_norm": "self_attn.q_norm",
    "all_k_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks",
    "o": "self_attn.o_proj",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_EXPERTS = {
    "router": "mlp.gate",
    "gate": "mlp.experts.{expert}.gate_proj",
    "up": "mlp.experts.{expert}.up_proj",
    "down": "mlp.experts.{expert}.down_proj",
}
_SHARED = {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_expert_gate": "mlp.shared_expert_gate",
}
# Multi-head latent attention's besides: from the hidden states to a latent vector, its norm, and from it to the heads
_LATENT = {
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
}
# PaddleNLP's own layers, which fuse q, k and v, and gate and up, or do not.
NATIVE = {
    "llama": Names(_LLAMA | {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_fused_proj"}, transposed=True),
    "gpt": Names(
        {
            "attention_norm": "norm1",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "qkv": "self_attn.qkv_proj",
            "o": "self_attn.out_proj",
            "mlp_norm": "norm2",
            "up": "linear1",
            "down": "linear2",
        },
        layers="decoder.layers",
        embed="embeddings.word_embeddings",
        norm="decoder.norm",
        positions="embeddings.position_embeddings",
        transposed=True,
    ),
}
# transformers' models; GPT-2's Conv1D has its weight [in, out].
HF = {
    "llama": Names(_LLAMA, base="model."),
    "phi3": Names(_LLAMA | {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}, base="model."),
    "olmo2": Names(_LLAMA, base="model."),
    "glm4": Names(
        _LLAMA
        | {
            "gate_up": "mlp.gate_up_proj",
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        base="model.",
    ),
    "experts": Names(_LLAMA, base="model.", sparse=_EXPERTS),
    "shared_experts": Names(_LLAMA, base="model.", sparse=_EXPERTS | _SHARED),
    "mixtral": Names(
        _LLAMA,
        base="model.",
        sparse={
            "router": "block_sparse_moe.gate",
            "gate": "block_sparse_moe.experts.{expert}.w1",
            "up": "block_sparse_moe.experts.{expert}.w3",
            "down": "block_sparse_moe.experts.{expert}.w2",
        },
    ),
    "granitemoe": Names(
        _LLAMA,
        base="model.",
        sparse={
            "router": "block_sparse_moe.router.layer",
            "gate_up": "block_sparse_moe.input_linear",
            "down": "block_sparse_moe.output_linear",
        },
    ),
    "gpt_oss": Names(
        _LLAMA,
        base="model.",
        stacked=True,
        sparse={
            "router": "mlp.router",
            "gate_up": "mlp.experts.gate_up_proj",
            "down": "mlp.experts.down_proj",
        },
    ),
    "deepseek": Names(
        _LLAMA | _LATENT,
        base="model.",
        sparse=_EXPERTS
        | {
            "expert_bias": "mlp.gate.e_score_correction_bias",
            "shared_gate": "mlp.shared_experts.gate_proj",
            "shared_up": "mlp.shared_experts.up_proj",
            "shared_down": "mlp.shared_experts.down_proj",
        },
    ),
    "gemma": Names(_LLAMA | {"mlp_norm": "pre_feedforward_layernorm"}, base="model."),
    "gpt": Names(
        {
            "attention_norm": "ln_1",
            "qkv": "attn.c_attn",
            "o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        base="transformer.",
        layers="h",
        embed="wte",
        norm="ln_f",
        positions="wpe",
        transposed=True,
    ),
}
