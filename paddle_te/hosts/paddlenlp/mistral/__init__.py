"""PaddleNLP's Mistral with Transformer Engine's decoder layers."""

from paddle_te.hosts.paddlenlp.mistral.modeling import MistralForCausalLM

__all__ = ["MistralForCausalLM"]
