"""Checkpoints: conversion between layouts, and the table of weight names behind it.

Knows neither Paddle nor a model's code; only `dims` touches Paddle tensors, when it is given some.
"""

from paddle_te.weights.config import native_config
from paddle_te.weights.contents import check_contents
from paddle_te.weights.converter import convert
from paddle_te.weights.dims import Dims
from paddle_te.weights.folder import check_layout
from paddle_te.weights.layout import SPLIT_AXIS
from paddle_te.weights.layouts import native_layout, te_layout
from paddle_te.weights.reader import read_tensors, read_weights
from paddle_te.weights.resharding import Degrees, why_not_resumable
from paddle_te.weights.splits import Split, layer_splits
from paddle_te.weights.state_dict import native_to_te, te_to_native
from paddle_te.weights.tensors import CheckpointError

__all__ = [
    "SPLIT_AXIS",
    "CheckpointError",
    "Degrees",
    "Dims",
    "Split",
    "check_contents",
    "check_layout",
    "convert",
    "native_config",
    "layer_splits",
    "native_layout",
    "native_to_te",
    "read_tensors",
    "read_weights",
    "te_layout",
    "te_to_native",
    "why_not_resumable",
]
