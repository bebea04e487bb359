"""Name the modules of a model in PaddleNLP's layout and in Hugging Face's, by a Family's `names`.

`layout` makes tables of tensors of them: a module's weight and bias have ".weight" and ".bias" after its name.
"""

from dataclasses import dataclass

# Modules that hold several parts
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclass(frozen=True)
class Names:
    """One layout's names.

    layer: {part of a decoder layer, or one of FUSED: its module}. layers: what stands before a layer's number. embed,
    norm, positions: the modules outside of the layers. base: what stands before all these names; None: the family's
    model_type and ".". transposed: the GEMMs' weights are [in, out].
    """

    layer: dict[str, str]
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    positions: str | None = None
    base: str | None = None
    transposed: bool = False


_LLAMA = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "all_q_norm": "self_attn.q_norm",
    "all_k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
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
