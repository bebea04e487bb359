"""Checkpoints: conversion between layouts, and the table of weight names behind it.

Knows neither Paddle nor a model's code; only `layout` touches Paddle tensors, when it is given some.
"""

from paddle_te.checkpoint.converter import convert
from paddle_te.checkpoint.folder import check_layout
from paddle_te.checkpoint.layout import native_to_te, te_to_native
from paddle_te.checkpoint.tensors import CheckpointError

__all__ = ["CheckpointError", "check_layout", "convert", "native_to_te", "te_to_native"]
