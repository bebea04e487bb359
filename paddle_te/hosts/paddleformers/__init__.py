"""PaddleFormers: its Llama. What works and what is refused stands in docs/guides/paddleformers.md."""

from paddle_te.hosts.paddleformers.modeling import LlamaForCausalLM, LlamaForCausalLMPipe, model_class

__all__ = ["LlamaForCausalLM", "LlamaForCausalLMPipe", "model_class"]
