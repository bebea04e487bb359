"""PaddleNLP's Llama with Transformer Engine's decoder layers."""

from paddle_te.hosts.paddlenlp.llama.modeling import LlamaForCausalLM, LlamaForCausalLMPipe

__all__ = ["LlamaForCausalLM", "LlamaForCausalLMPipe"]
