"""NVIDIA Transformer Engine for PaddlePaddle and PaddleNLP."""

__version__ = "0.2.0"
