"""Merges a LoRA adapter into the weights: what `paddleformers-cli export run.yaml` does, with a repair.

PaddleFormers 1.2.0 transposes the merged weights without copying them and gives them to safetensors, whose versions
from 0.8 on write such arrays in the order in which they lie in memory: the file has the right names and shapes, and
numbers in wrong places. It does so with its own layers as well.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from paddleformers.cli.export.export import run_export
from paddleformers.mergekit import merge_model

from paddle_te.hosts.paddleformers.recipes import without_ours
from paddle_te.hosts.paddleformers.replaced import replaced


def export(recipe: dict[str, Any]) -> None:
    """Merge the adapter in a recipe's output_dir, of whichever backend, and save the model in output_dir/export.

    recipe: a dict of PaddleFormers' arguments; those about our decoder layers are left out.
    """
    with replaced(merge_model, save_file=_save_contiguous):
        run_export(without_ours(recipe))


def _save_contiguous(
    arrays: Mapping[str, NDArray[Any]], path: str | Path, metadata: dict[str, str] | None = None
) -> None:
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    safetensors.numpy.save_file(whole, path, metadata)
