"""PaddleNLP's Llama with Transformer Engine's decoder layers."""

from paddle_te.models.llama.modeling import LlamaForCausalLM, LlamaForCausalLMPipe

__all__ = ["LlamaForCausalLM", "LlamaForCausalLMPipe"]
