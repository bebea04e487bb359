"""PaddleNLP's Qwen2 and Qwen2.5 with Transformer Engine's decoder layers."""

from paddle_te.hosts.paddlenlp.qwen2.modeling import Qwen2ForCausalLM, Qwen2ForCausalLMPipe

__all__ = ["Qwen2ForCausalLM", "Qwen2ForCausalLMPipe"]
