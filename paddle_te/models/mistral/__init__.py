"""PaddleNLP's Mistral with Transformer Engine's decoder layers."""

from paddle_te.models.mistral.modeling import MistralForCausalLM

__all__ = ["MistralForCausalLM"]
