"""What the modules of a model are called in PaddleNLP's layout and in Hugging Face's, by a Family's `names`.

`layout` makes tables of tensors of them: a module's weight and bias have ".weight" and ".bias" after its name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """One layout's names.

    layers: the decoder layers, before a layer's number. layer: {part of a layer: the module that holds it}; "qkv" and
    "gate_up" hold several parts. embed, norm, positions: outside of the layers.
    base: what stands before all names but those inside of a layer and lm_head's; None: the family's model_type and ".".
    transposed: the GEMMs' weights are [in, out].
    """

    layer: dict
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
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# PaddleNLP's own layers, which may fuse q, k and v, and gate and up. What they fuse keeps a name for each part, too.
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
