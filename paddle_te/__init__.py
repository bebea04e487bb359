"""NVIDIA Transformer Engine for PaddlePaddle and PaddleNLP."""

__version__ = "0.1.0"
