"""PaddleFormers: its Llama. What works and what is refused stands in docs/paddleformers.md."""

from paddle_te.hosts.paddleformers.modeling import LlamaForCausalLM, model_class

__all__ = ["LlamaForCausalLM", "model_class"]
