"""PaddleNLP's Llama with Transformer Engine's decoder layers."""

from paddle_te.models.llama.modeling import (
    LlamaForCausalLM,
    LlamaForCausalLMPipe,
    causal_mask_only,
    model_class,
    replace_decoder_layers,
)

__all__ = [
    "LlamaForCausalLM",
    "LlamaForCausalLMPipe",
    "causal_mask_only",
    "model_class",
    "replace_decoder_layers",
]
