"""The switch: PaddleNLP's Llama models built with TE's decoder layers."""

import os
from contextlib import contextmanager

import paddle
from paddlenlp.transformers.llama import modeling, modeling_pp

from paddle_te.llama.decoder import FROM_ZERO, TELlamaDecoderLayer, TELlamaDecoderLayerPipe
from paddle_te.llama.tensor_parallel import layer_mappings

# --transformer_engine_backend, and what the launch script calls it
BACKENDS = {"none": "none", "pd": "paddle", "te": "transformer_engine"}


@contextmanager
def replace_decoder_layers():
    """While it lasts, PaddleNLP's Llama constructors build our decoder layers; afterwards nothing has changed."""
    kept = modeling.LlamaDecoderLayer, modeling_pp.LlamaDecoderLayerPipe
    modeling.LlamaDecoderLayer, modeling_pp.LlamaDecoderLayerPipe = TELlamaDecoderLayer, TELlamaDecoderLayerPipe
    try:
        yield
    finally:
        modeling.LlamaDecoderLayer, modeling_pp.LlamaDecoderLayerPipe = kept


@contextmanager
def causal_mask_only():
    """While it lasts, PaddleNLP's Llama makes no [b, 1, s, s] mask: its layers get None, which means causal."""
    kept = os.environ.get("USE_CASUAL_MASK")
    os.environ["USE_CASUAL_MASK"] = "True"
    try:
        yield
    finally:
        os.environ.pop("USE_CASUAL_MASK")
        if kept is not None:
            os.environ["USE_CASUAL_MASK"] = kept


class _TELlama:
    """What the plain and the pipeline model share."""

    @classmethod
    def _get_tensor_parallel_mappings(cls, config, is_split=True):
        mappings = super()._get_tensor_parallel_mappings(config, is_split)
        kept = {name: action for name, action in mappings.items() if not name.startswith("layers.")}
        return kept | layer_mappings(config, is_split)

    @classmethod
    def _get_fuse_or_split_param_mappings(cls, config, is_fuse=False):
        return {}  # the layout is always fused


class LlamaForCausalLM(_TELlama, modeling.LlamaForCausalLM):
    """PaddleNLP's LlamaForCausalLM with TE's decoder layers, chosen by config.transformer_engine_backend."""

    def __init__(self, config):
        with replace_decoder_layers():
            super().__init__(config)

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **kwargs):
        """As PaddleNLP's. Without attention_mask sequences are whole and causal, without position_ids from 0 on."""
        position_ids = FROM_ZERO if position_ids is None else position_ids
        if attention_mask is not None:
            return super().forward(input_ids, position_ids, attention_mask, **kwargs)
        with causal_mask_only():
            return super().forward(input_ids, position_ids, **kwargs)

    @staticmethod
    def prepare_attention_mask_for_generation(input_ids, pad_token_id, eos_token_id):
        """The mask [b, s] of a `generate` that is given none: padding is hidden where it has a token of its own.

        PaddleNLP's own is additive and [b, 1, 1, s], which its Llama does not read.
        """
        if pad_token_id is None or pad_token_id == eos_token_id:
            return paddle.ones_like(input_ids)
        return (input_ids != pad_token_id).astype(input_ids.dtype)

    def adjust_logits_during_generation(self, logits):
        """Tokens are chosen in float32 whatever the model computes in: bfloat16 has near ties, and lacks kernels."""
        return logits.astype("float32")


class LlamaForCausalLMPipe(_TELlama, modeling_pp.LlamaForCausalLMPipe):
    """PaddleNLP's LlamaForCausalLMPipe with TE's decoder layers."""

    def __init__(self, config):
        with replace_decoder_layers():
            super().__init__(config)


def model_class(backend, pipeline=False):
    """The Llama class for --transformer_engine_backend `backend`: PaddleNLP's own, untouched, for "none"."""
    if backend not in BACKENDS.values():
        raise ValueError(f"transformer_engine_backend={backend!r}; it may be one of {', '.join(BACKENDS.values())}")
    if backend == "none":
        return modeling_pp.LlamaForCausalLMPipe if pipeline else modeling.LlamaForCausalLM
    return LlamaForCausalLMPipe if pipeline else LlamaForCausalLM
