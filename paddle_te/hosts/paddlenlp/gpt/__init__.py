"""PaddleNLP's GPT with Transformer Engine's decoder layers."""

from paddle_te.hosts.paddlenlp.gpt.modeling import GPTForCausalLM, GPTForCausalLMPipe

__all__ = ["GPTForCausalLM", "GPTForCausalLMPipe"]
